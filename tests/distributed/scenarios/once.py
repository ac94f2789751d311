"""What one rank does for all: list and inspect many shards, write files, warn, show progress, run commands."""

import contextlib
import io
import os
import shutil
import warnings

import numpy as np
from reporting import ARGUMENTS, DATA, OUT, caught, digest, report

import lazyshards
from lazyshards import cli, manifest
from lazyshards.engines.ranks import node_id
from lazyshards.storage import LocalStorage
from lazyshards.writers import local_work

RANK = node_id()
MANY = ARGUMENTS[0]
found, looks, writes = {}, {}, {}
counts = {}


def counted(owner, name):
    """Count the calls of a function that this rank makes."""
    function = getattr(owner, name)

    def call(*arguments, **options):
        counts[name] = counts.get(name, 0) + 1
        return function(*arguments, **options)

    setattr(owner, name, call)


counted(LocalStorage, "find")
counted(manifest, "save")
counted(local_work, "_put")


def case(name, action):
    """Note what an action gave, and what this rank did for it."""
    counts.clear()
    found[name] = caught(action)
    looks[name], writes[name] = counts.get("find", 0), counts.get("save", 0) + counts.get("_put", 0)


def opened(path, **options):
    """Open a dataset and say what it holds."""
    ds = lazyshards.open_shards(path, **options)
    return ds.fingerprint, digest(ds[1_000:3_000].compute())


def copy(name, function):
    """Return a directory of the many shards, one for each rank, that this rank knows by the same path as the others."""
    os.makedirs(os.path.join(OUT, f"{name}-{RANK}"))
    os.chdir(os.path.join(OUT, f"{name}-{RANK}"))
    shutil.copytree(MANY, "many", copy_function=function)
    return "/proc/self/cwd/many"


# Opening ------------------------------------------------------------------------------------------------------------

case("many", lambda: opened(MANY))
case("few", lambda: opened(DATA))
case("a list", lambda: opened(os.path.join(MANY, name) for name in sorted(os.listdir(MANY))))
case("a glob", lambda: opened(f"{MANY}/*.npy", dtype="f8"))
case("a path of its own", lambda: opened(os.path.join(*[".."] * (40 + RANK), MANY[1:])))
case("copies", lambda: opened(copy("copies", shutil.copy)))

path = copy("links", os.link)
names = [os.path.join("many", name) for name in sorted(os.listdir("many"))]


def replace(name, rows):
    """Put another file in the place of one, where a link of it is another rank's."""
    os.remove(name)
    np.save(name, rows)


if RANK == 1:
    replace(names[-1], np.zeros((7, 3), "f4"))
case("another last shard", lambda: opened(path))

path = copy("unseen", os.link)
if RANK == 1:
    replace(names[1_400], np.ones((2, 3), "f4"))  # in the tile that this rank reads
case("another shard", lambda: lazyshards.open_shards(path).fingerprint)
unseen = lazyshards.open_shards(path)
case("reading it", lambda: unseen.compute(tiles_per_processor=1))
if RANK == 1:
    shutil.rmtree("many")
case("not mounted", lambda: opened(path))
case("no policy", lambda: opened(MANY, manifest="perhaps"))


def read(path, start, stop):
    """Read rows as a user's function does."""
    return np.load(path)[start:stop]


case(
    "a function",
    lambda: opened(f"{MANY}/*.npy", reader=read, rows=lambda path: len(np.load(path)), dtype="f4", row_shape=(3,)),
)

# Writing ------------------------------------------------------------------------------------------------------------

shared = os.path.join(OUT, "shared")
few = lazyshards.open_shards(DATA)
whole = few.to_numpy()
loaded = few.compute()


def written(source, name, **options):
    """Write something and say what is there afterwards."""
    paths = lazyshards.write_shards(source, os.path.join(shared, name), rows_per_shard=900, **options)
    return [os.path.relpath(path, shared) for path in paths], digest(lazyshards.open_shards(os.path.dirname(paths[0])))


def failing():
    """Yield arrays, on rank 1 only until something goes wrong."""
    yield whole[:100]
    if RANK == 1:
        raise OSError("the disk of rank 1")
    yield whole[100:200]


case("write numpy", lambda: written(whole, "numpy"))
case("write dataset", lambda: written(few[::2], "dataset", format="hdf5"))
case("write cupynumeric", lambda: written(-loaded, "cupynumeric"))
case("write batches", lambda: written((batch + 1 for batch in few.batches(500)), "batches", format="raw"))
case("write where something is", lambda: written(whole, "numpy"))
case("write over it", lambda: written(whole[:1_000], "numpy", overwrite=True))
case("write lists", lambda: written([[1, 2], [3, 4]], "lists"))
case("write what fails on rank 1", lambda: written(failing(), "failing"))
case("index", lambda: os.path.relpath(lazyshards.open_shards(os.path.join(shared, "cupynumeric")).save_manifest(), OUT))
case("index again", lambda: opened(os.path.join(shared, "cupynumeric"), manifest="require"))
os.makedirs(shared, exist_ok=True)
case("refresh", lambda: opened(MANY, manifest="refresh"))
case("by the manifest", lambda: opened(MANY, manifest="require"))
case("by its name", lambda: opened(os.path.join(MANY, "_lazyshards.arrow")))

# Speaking -----------------------------------------------------------------------------------------------------------

with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    changing = lazyshards.open_shards(os.path.join(shared, "batches"), on_change="warn")
    found["before"] = caught(lambda: digest(changing.compute()))
    if RANK == 0:  # in the last tile, which rank 1 reads
        last = changing.shards[-1].path
        os.utime(last, ns=(1, 1))
    few[:5].compute()
    found["after"] = caught(lambda: digest(changing.compute(tiles_per_processor=2)))
messages = [str(warning.message) for warning in warned]

shown = {}
for name, action in {
    "compute": lambda: few.compute(progress=True),
    "batches": lambda: list(few.batches(800, progress=True)),
    "bundle": lambda: list(lazyshards.zip_shards(x=few, y=few).batches(800, progress=True)),
    "write": lambda: written(loaded, "shown", progress=True),
}.items():
    with contextlib.redirect_stderr(io.StringIO()) as text:
        found[f"shown: {name}"] = [caught(action)[0]]
    shown[name] = text.getvalue()

said = {}
for name, command in {
    "info": ["info", DATA],
    "index": ["index", os.path.join(shared, "numpy")],
    "convert": ["convert", DATA, os.path.join(shared, "converted"), "--to", "raw"],
    "verify": ["verify", DATA],
}.items():
    with contextlib.redirect_stdout(io.StringIO()) as text:
        status = cli.main(command)
    said[name] = [status, text.getvalue()]
case("at the end", lambda: digest(few[50:900].compute()))
report(found=found, looks=looks, writes=writes, messages=messages, shown=shown, said=said)
