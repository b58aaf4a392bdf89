#!/usr/bin/env bash
# litdata 0.2.76 with torch 2.14.1, a StreamingDataLoader with two workers.
#
# Guess: state_dict() right after load_state_dict(state) returns that state. So a job that is stopped again before its
#   first batch changes nothing: the jobs together see each row of the epoch once, in the order of an uninterrupted job.
# Behaviour: the saved index of the last worker is one higher than the loaded one. The next job begins with the other
#   worker, so the order of the batches changes. If it also stops in the middle, its state credits a batch to the wrong
#   worker: the job after it sees rows a second time, and others never. The number of rows is right. Without the job that
#   drew nothing all is right, as it is with num_workers=0.
# Why it matters: a job that is preempted while it compiles, or that saves what it has just restored, is the usual way to
#   such a state. No error says so, and each restart of this kind adds more rows.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.14.1 litdata==0.2.76 numpy==2.1.3
cat > "$dir/job.py" <<'PY'
import sys
import warnings

import litdata

warnings.simplefilter("ignore")
ROWS = 24


def row(index):
    return {"row": index}


def loader(workers):
    data = litdata.StreamingDataset(f"{sys.argv[1]}/data", shuffle=True, seed=1)
    return litdata.StreamingDataLoader(data, batch_size=2, num_workers=workers, multiprocessing_context="fork" if workers else None)


def jobs(workers, batches):
    """Returns the rows that several jobs see, each of which draws some batches, and the last one the rest."""
    seen, state = [], None
    for wanted in [*batches, None]:
        found = loader(workers)
        if state is not None:
            found.load_state_dict(state)
        if wanted is None:
            seen += [batch["row"].tolist() for batch in found]
            break
        if wanted:
            drawn = iter(found)
            seen += [next(drawn)["row"].tolist() for _ in range(wanted)]
        after = found.state_dict()
        if not wanted:
            print(f"  a job that drew nothing: worker {state['latest_worker_idx']} -> {after['latest_worker_idx']}")
        state = after
    return seen


def main():
    litdata.optimize(fn=row, inputs=list(range(ROWS)), output_dir=f"{sys.argv[1]}/data", num_workers=1, chunk_size=5)
    asked = {(2, (3, 1)): (True, 0), (2, (3, 0)): (False, 0), (2, (3, 0, 1)): (False, 2), (0, (3, 0, 1)): (True, 0)}
    found, plain = {}, {workers: jobs(workers, ()) for workers in (0, 2)}
    for workers, batches in asked:
        seen = jobs(workers, batches)
        rows = sum(seen, [])
        twice, never = sorted({n for n in rows if rows.count(n) > 1}), sorted(set(range(ROWS)) - set(rows))
        found[workers, batches] = (seen == plain[workers], len(never))
        print(f"{workers} workers, jobs of {batches} batches and the rest:", end=" ")
        print(f"same order {found[workers, batches][0]}, twice {twice}, never {never}")
        assert len(twice) == len(never) and len(rows) == ROWS
    assert found == asked, f"the behaviour has changed: {found}"


if __name__ == "__main__":
    main()
PY
"$dir/venv/bin/python" "$dir/job.py" "$dir" > "$dir/out" 2>&1 || { cat "$dir/out"; exit 1; }
grep -E "^  a job|^[02] workers" "$dir/out"
