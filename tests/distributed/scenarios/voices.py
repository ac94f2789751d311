"""Who prints and warns, and what a child of a rank does."""

import subprocess
import sys
import warnings

from reporting import DATA, report

import lazyshards

ds = lazyshards.open_shards(DATA)
ds[1_000:1_500].explain()
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    lazyshards.open_shards(DATA).astype("U8", casting="unsafe")[:3].compute()
child = "import lazyshards, sys; ds = lazyshards.open_shards(sys.argv[1]); print(ds.engine, ds[:5].compute().shape)"
done = subprocess.run([sys.executable, "-c", child, DATA], capture_output=True, text=True, timeout=60, check=False)
report(warned=len(warned), child=done.stdout + done.stderr, rows=len(ds[:10].compute()))
