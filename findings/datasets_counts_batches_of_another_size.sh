#!/usr/bin/env bash
# datasets 5.2.0, an IterableDataset with batch(n) or map(batched=True).
#
# Guess: the state counts rows. A dataset with another batch size continues at the next row, or load_state_dict raises.
# Behaviour: the state has a position in the source and how many batches have been taken since. These are counted again
#   with the new size. After 4 batches of 2 rows, a dataset with batches of 8 has no rows left of 24, and after 2
#   batches of 4, one with batches of 2 starts at row 4 again. In a batched map, whose batch size changes nothing in
#   what it returns, the rows move too.
# Why it matters: the batch size changes with the number of devices or with the memory, and training is resumed because
#   of that. Rows are left out or come twice, without an error.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet datasets==5.2.0
export HF_HOME="$dir/home" HF_HUB_OFFLINE=1
"$dir/venv/bin/python" - <<'PY' 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
import datasets

ROWS = 24


def batches(size):
    return datasets.Dataset.from_dict({"x": list(range(ROWS))}).to_iterable_dataset().batch(size)


def mapped(size):
    rows = datasets.Dataset.from_dict({"x": list(range(ROWS))}).to_iterable_dataset()
    return rows.map(lambda batch: batch, batched=True, batch_size=size)


def first_row(make, before, after, number):
    """The first row after `number` elements with the size `before`, when the rest is read with the size `after`."""
    used = make(before)
    elements = iter(used)
    for _ in range(number):
        next(elements)
    resumed = make(after)
    resumed.load_state_dict(used.state_dict())
    rest = [row["x"] for row in resumed]
    return (rest[0][0] if isinstance(rest[0], list) else rest[0]) if rest else "no rows"


cases = {
    "batch": [(batches, 4, 4, 2), (batches, 4, 2, 2), (batches, 2, 4, 4), (batches, 2, 8, 4)],
    "map": [(mapped, 4, 4, 6), (mapped, 4, 2, 6), (mapped, 4, 8, 6), (mapped, 2, 8, 6)],
}
found = {name: [first_row(*case) for case in every] for name, every in cases.items()}
for name, wanted in (("batch", 8), ("map", 6)):
    for (_, before, after, _), row in zip(cases[name], found[name]):
        print(f"{name}, {wanted} rows used with size {before}, continued with size {after}: first row {row}")
assert found["batch"] == [8, 4, 16, "no rows"], "datasets behaves otherwise now"
assert found["map"] == [6, 4, 10, 18], "datasets behaves otherwise now"
PY
