"""Reads with Levanter what Treering wrote for it.

First run `python check.py NAME write FOLDER` with Treering installed. It converts that release's checkpoints in this
folder and, if its JAX can run that release, saves a live state. Then run `python check.py NAME read FOLDER` with that
Levanter, which must find the same bits and the latest checkpoint.
"""

import json
import pathlib
import sys

import jax
import library
import make

release, what, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
expected = json.loads((make.HERE / "expected.json").read_text())
mine = {name: leaves for name, leaves in expected.items() if name.startswith(release + "/")}
if what == "write":
    import treering as tr

    for name in mine:
        tr.convert(make.HERE / name, folder / "own", overwrite=True)
        tr.convert(folder / "own", folder / name, format="levanter")
    if release != "1.1":
        made, rest = make.state(7)
        tr.save(folder / "live" / release / "step-7", {"model": made, **rest}, format="levanter")
        like = jax.tree.map(jax.numpy.zeros_like, make.eqx.filter(made, make.eqx.is_array))
        back = tr.restore(make.HERE / release / "step-20", like=like, at="model")
        assert type(back.layers[0].weight) is make.hax.NamedArray and back.layers[0].weight.axes == (make.IN, make.OUT)
        given = jax.tree.leaves(make.model(20))
        assert all((one == other).all() for one, other in zip(jax.tree.leaves(back), given, strict=True))
else:
    for name, leaves in mine.items():
        found = json.loads(json.dumps(make.described(make.read(str(folder / name), int(name.split("-")[-1])))))
        assert found == leaves, {path for path in leaves if found.get(path) != leaves[path]}
    latest = library.checkpoint.discover_latest_checkpoint(str(folder / release))
    assert latest is not None and latest.endswith("step-100" if release == "0.2.20" else "step-20")
    if release != "1.1":
        path = str(folder / "live" / release / "step-7")
        made, rest = make.state(7)
        given = {"model": made, **rest}
        blank = jax.tree.map(lambda leaf: leaf * 0, make.eqx.filter(given, make.eqx.is_array))
        found = library.checkpoint.load_checkpoint(blank, path, axis_mapping=make.AXES, mesh=make.MESH)
        leaves = jax.tree.leaves(make.eqx.filter(given, make.eqx.is_array))
        for one, other in zip(jax.tree.leaves(found), leaves, strict=True):
            assert make.described({"": one}) == make.described({"": other})
        print("live:", len(leaves), "leaves")
    print(release, *(f"{name}: {len(leaves)} leaves" for name, leaves in mine.items()))
