"""Tests that jobs of an earlier release and of this one share a run.

The earlier release is the source of its commit, which the history has: "release: VERSION". An archive without a history
skips these tests.
"""

import io
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tarfile

import pytest

import treering as tr

ROOT = pathlib.Path(__file__).parents[1]
RELEASES = sorted(path.name for path in (ROOT / "tests/golden/released").iterdir() if path.name != "0.1.0")


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The `src` folder of an earlier release."""
    found = _git("log", "--format=%H", f"--grep=^release: {request.param.replace('.', '[.]')}$").split()
    if not found:
        pytest.skip(f"the history lacks the commit 'release: {request.param}'")
    folder = tmp_path_factory.mktemp("release")
    done = subprocess.run(["git", "archive", found[-1], "src"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def _run(source: pathlib.Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(source), "JAX_PLATFORMS": "cpu", "AWS_ALLOW_HTTP": "true"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("earlier_first", [True, False])
@pytest.mark.parametrize("place", ["disk", "tier", "bucket"])
def test_jobs_of_two_releases_take_turns(
    place: str, earlier_first: bool, release: pathlib.Path, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    run = f"{request.getfixturevalue('bucket')}/run" if place == "bucket" else str(tmp_path / "run")
    local = str(tmp_path / "local") if place == "tier" else ""
    both = (release, ROOT / "src") if earlier_first else (ROOT / "src", release)
    turns = [(0, 4, "close"), (4, 8, "kill"), (8, 12, "kill"), (12, 14, "close"), (14, 16, "close")]
    for source, (after, last, end) in zip(itertools.cycle(both), turns, strict=False):
        done = _run(source, ROOT / "tests/jobs/turns.py", run, local, after, last, end)
        assert done.returncode == (-9 if end == "kill" else 0), done.stderr
    wanted = {3, 4, 8, 12, 14, 15, 16}  # the best, pinned ones, and the last two
    for source in both:
        listed = json.loads(_run(source, "-m", "treering", "ls", run, "--json").stdout)
        assert {row["step"] for row in listed["steps"]} == wanted
        checked = _run(source, "-m", "treering", "verify", run)
        assert checked.returncode == 0, checked.stdout
    assert {step: "val" in tr.open(run, step=step).metrics for step in (4, 14, 16)} == {4: True, 14: True, 16: True}


@pytest.mark.slow
@pytest.mark.parametrize("release", ["1.0.0rc1"], indirect=True)  # 1.0.0 has them
def test_an_earlier_release_refuses_published_weights(release: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """An array file with differences needs a feature that it lacks: no other values, and no step less."""
    import jax.numpy as jnp
    import numpy as np

    weights = np.random.default_rng(0).normal(size=1 << 16).astype(jnp.bfloat16)
    with tr.Publisher(tmp_path / "stream") as publisher:
        for version in (1, 2, 3):
            weights = np.array(weights)
            weights[version] += 1
            publisher.publish(version, {"w": jnp.asarray(weights)})
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    code = (
        "import sys, jax.numpy as jnp, treering as tr; run = sys.argv[1]\n"
        "try: tr.restore(run)\n"
        "except tr.errors.UnsupportedError as error: print(error)\n"
        "with tr.Checkpointer(run, keep=tr.keep.last(1)) as ckpts:\n"
        "    try: ckpts.restore_or_init(lambda: {'w': jnp.zeros(65536, jnp.bfloat16)})\n"
        "    except tr.errors.UnsupportedError as error: print(error)\n"
    )
    done = _run(release, "-c", code, tmp_path / "stream")
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all("differences" in line for line in lines), done
    assert _run(release, "-m", "treering", "verify", tmp_path / "stream").returncode == 3
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


_READ = """
import collections, hashlib, json, sys
import numpy as np, treering as tr

def plain(value):
    if isinstance(value, (np.ndarray, np.generic)):
        return [str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, dict):
        return [[repr(key), plain(one)] for key, one in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return [plain(one) for one in value]
    return plain(value[...]) if hasattr(value, "shape") else repr(value)

found = {}
for path in sys.argv[1:]:
    try:
        ckpt = tr.open(path)
        found[path] = [plain(dict(ckpt.items())), plain(ckpt.metrics), plain(ckpt.metadata)]
    except tr.errors.UnsupportedError as error:
        found[path] = str(error)
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.whole
def test_an_earlier_release_reads_the_same_or_refuses(release: pathlib.Path) -> None:
    """It ignores a new field only if the values are the same without it; else the error names the feature."""
    paths = [path for path in sorted((ROOT / "tests/golden").glob("v1-*")) if path.name != "v1-orbax-run"]
    theirs, ours = (json.loads(_run(source, "-c", _READ, *paths).stdout) for source in (release, ROOT / "src"))
    refused = {pathlib.Path(path).name: text for path, text in theirs.items() if isinstance(text, str)}
    lacks = set() if (release / "treering/_publish").exists() else {"v1-differences", "v1-differences-in-parts"}
    assert refused.keys() == lacks
    for name, text in refused.items():
        assert f"found that it requires {name.removeprefix('v1-')}; it is undamaged" in text
    same = {path: found for path, found in theirs.items() if not isinstance(found, str)}
    assert same == {path: ours[path] for path in same}
    assert not any(isinstance(found, str) for found in ours.values())
