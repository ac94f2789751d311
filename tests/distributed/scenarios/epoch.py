"""An epoch of shuffled batches: killed at some point, or resumed from the state that rank 0 saved."""

import json
import os
import signal

from reporting import ARGUMENTS, DATA, digest, report

import lazyshards
from lazyshards.engines.ranks import is_first_rank, node_id

state_file, kill_after = ARGUMENTS[0], int(ARGUMENTS[1])
batches = lazyshards.open_shards(DATA).batches(150, shuffle=True, seed=11)
if os.path.exists(state_file):
    with open(state_file, encoding="utf-8") as file:
        batches.load_state_dict(json.load(file)["state"])
seen = []
for batch in batches:
    seen.append(digest(batch))
    if is_first_rank():
        with open(f"{state_file}.new", "w", encoding="utf-8") as file:
            json.dump({"state": batches.state_dict(), "seen": seen}, file)
        os.replace(f"{state_file}.new", state_file)
    if len(seen) == kill_after and node_id() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
report(seen=seen)
