"""Writes the missing files of `tests/golden/verdicts`, and what a reader must find in them."""

import json
from pathlib import Path

from . import arrays, files, manifests, values
from .drafts import Case

HERE = Path(__file__).parent.parent / "golden" / "verdicts"


FAMILIES = [
    values.values,
    values.keys,
    values.trees,
    values.paths,
    arrays.dtypes,
    arrays.shapes,
    arrays.layouts,
    arrays.placements,
    arrays.ties,
    arrays.states,
]
FAMILIES += [
    files.files,
    files.headers,
    files.damage,
    manifests.texts,
    manifests.fields,
    manifests.future,
    manifests.late,
]


def every() -> list[Case]:
    """Returns all cases. Asserts that their names are unique."""
    cases = [case for family in FAMILIES for case in family()]
    assert len({case.name for case in cases}) == len(cases)
    return cases


def main() -> None:
    listed = HERE / "verdicts.json"
    verdicts = json.loads(listed.read_text()) if listed.exists() else {}
    for case in every():
        if case.name not in verdicts:
            files = case.draft.written()
            place = HERE / case.name
            place.mkdir(parents=True)
            for name, data in (files | case.more(files)).items():
                (place / name).write_bytes(data)
            verdicts[case.name] = case.verdict()
    listed.write_text(json.dumps(verdicts, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    print(f"{len(verdicts)} cases")


if __name__ == "__main__":
    main()
