"""Changes sealed checkpoints at random and seals them again, so that only the rules of the format decide."""

import copy
import json
import pathlib
import random
from typing import Any

import xxhash

_VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 3, 2**53, 2**53 + 1, 2**64, 1.0, -0.0, 1.5, 1e300, "", "0", "x", "a", "nan", "inf",
    "nan:7ff8000000000001", "0x20000000000001", "AA==", "/", "~", [], [0], [[0, 0]], [0, 0], ["x"], {}, {"x": 1},
    {"requires": ["x"]}, ["int", 1], ["float", 0.5], ["bytes", "AA=="], ["tuple", ["a"]],
    ["list", "", 0], ["dict", "", []],
    {"name": "x", "xxh3": "0123456789abcdef"},
    ["value", "a", "int", 1], {"mesh": {"x": 2}, "spec": ["y"]}, {"axis_types": ["auto"]}, {"devices": [1, 2]},
]  # fmt: skip
_FIELDS = [
    "requires", "step", "metrics", "metadata", "metadata_floats", "layouts", "holders", "placement", "static", "base",
    "more",
]  # fmt: skip


def mutate(choice: random.Random, value: Any) -> Any:
    """Returns a copy of a JSON value with one change."""
    changed = [copy.deepcopy(value)]
    places: list[tuple[Any, Any]] = []
    todo: list[Any] = [changed]
    while todo:
        node = todo.pop()
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                todo.append(node[key])
    node, key = choice.choice(places[1:])
    action = choice.choice(["value", "value", "number", "delete", "insert", "swap"])
    if action == "number" and type(node[key]) is int:
        node[key] += choice.choice([-1, 1, 2**52])
    elif action == "delete":
        del node[key]
    elif action == "insert" and isinstance(node, list):
        node.insert(key, copy.deepcopy(choice.choice([*_VALUES, *node])))
    elif action == "insert":
        node[choice.choice(_FIELDS)] = copy.deepcopy(choice.choice(_VALUES))
    elif action == "swap":
        other, place = choice.choice(places[1:])
        node[key] = (
            copy.deepcopy(other[place]) if place in (other if isinstance(other, dict) else range(len(other))) else 0
        )
    else:
        node[key] = copy.deepcopy(choice.choice(_VALUES))
    return changed[0]


def write_mutant(choice: random.Random, origin: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes a checkpoint with a changed manifest or a changed header, sealed."""
    manifest = json.loads((origin / "treering.json").read_text("utf-8"))
    del manifest["xxh3"]
    files = {file.name: file.read_bytes() for file in origin.glob("*.safetensors")}
    if files and choice.random() < 0.4:
        name = choice.choice(sorted(files))
        length = int.from_bytes(files[name][:8], "little")
        buffer = files[name][8 + length :]
        header = json.dumps(mutate(choice, json.loads(files[name][8 : 8 + length]))).encode()
        header = len(header).to_bytes(8, "little") + header
        files[name] = header + buffer
        for entry in manifest["files"]:
            if entry["name"] == name:
                seal = xxhash.xxh3_64_hexdigest(header)
                entry.update(size=len(files[name]), header=len(header), xxh3=seal)
    else:
        manifest = mutate(choice, manifest)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    text = json.dumps(manifest)
    body = (text[:-1] if isinstance(manifest, dict) else text).encode()
    (folder / "treering.json").write_bytes(body + f',"xxh3":"{xxhash.xxh3_64_hexdigest(body)}"}}\n'.encode())
