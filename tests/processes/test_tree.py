"""Tests the tree of processes of a large job. Real jobs here have small trees; a larger job is simulated."""

import itertools
import pathlib
import secrets
import time
import types

import pytest
from benchmarks import simulation

from jobs import run_job
from treering._processes import call_tree, host_relay, multi_process
from treering._processes.call_history import History
from treering.errors import PeerError

TWO_CHILDREN = "from treering._processes import call_tree; call_tree.FAN_OUT = 2"
BY_HOST = """
import threading
from treering._processes import call_tree, host_relay, multi_process
call_tree._MAX_SIGNS_PER_SECOND = 4
given, roles = [], []
give, join = multi_process.MultiProcessCall._put_sign, host_relay.join_host
multi_process.MultiProcessCall._put_sign = lambda self, key, sign: (given.append(sign), give(self, key, sign))
def noting(name):
    found = join(name)
    roles.append(type(found).__name__)
    return found
host_relay.join_host = noting
"""
KILLED = -9


@pytest.mark.parametrize("count", [1, 2, 16, 65, 66, 4_161, 4_162, 100_000])
def test_each_process_has_one_parent(count: int) -> None:
    """Each process except process 0 is the child of exactly one process."""
    children = list(itertools.chain.from_iterable(call_tree.children(index, count) for index in range(count)))
    assert children == list(range(1, count))
    assert all(
        call_tree.parent(child) == index for index in (0, 1, 64, 1_000) for child in call_tree.children(index, count)
    )
    assert max(len(call_tree.children(index, count)) for index in range(min(count, 100))) <= call_tree.FAN_OUT


def test_signs_of_life_do_not_drown_the_store() -> None:
    """The store gets at most 2,000 signs of life per second, and the timeout allows for their interval.

    It also gets at most 2,000 polls per second, both from processes with children and from the others.
    """
    for count in (1, 64, 2_000, 10_000, 100_000):
        assert count / call_tree.heartbeat_seconds(count) <= 2_000
        assert call_tree.timeout(30, count) >= min(4 * call_tree.heartbeat_seconds(count), 30)
        assert call_tree.timeout(500, count) >= 500
        assert count / call_tree.poll_seconds(count, hears=False) <= 2_000
        with_children = -(-count // call_tree.FAN_OUT)
        assert 6 * with_children / call_tree.poll_seconds(count, hears=True) <= 2_000
    # Processes with children may poll more often, because they are few.
    assert call_tree.poll_seconds(10_000, hears=True) < 1 < call_tree.poll_seconds(10_000, hears=False)
    assert call_tree.timeout(3, 2_000) == 3 and call_tree.heartbeat_seconds(2_000) == 1


@pytest.mark.slow
def test_sixteen_processes_save_and_restore_through_four_levels(tmp_path: pathlib.Path) -> None:
    body = """
    value = np.arange(16 * 64.0, dtype=np.float32).reshape(16, 64)
    with tr.Checkpointer(tmp / "run", keep=tr.keep.last(2), save_every=2) as ckpts:
        for step in range(5):
            ckpts.save(step, {"rows": put(value + step, P("x")), "all": np.full(5, step), "n": step})
    with tr.Checkpointer(tmp / "run") as ckpts:
        found = ckpts.restore({"rows": put(value, P("x")), "all": np.zeros(5, int), "n": 0})
    report([same(found["rows"], value + 4), found["all"].tolist(), found["n"], ckpts.restored_step, ckpts.steps])
    """
    results = run_job(tmp_path, _dedented(body), processes=16, devices=1, before=TWO_CHILDREN, timeout=240)
    assert [result.report for result in results] == [[True, [4] * 5, 4, 4, [2, 4]]] * 16


@pytest.mark.slow
def test_tree_spreads_failures_and_names_dead_process(tmp_path: pathlib.Path) -> None:
    """In a tree, all processes raise the error of one, and name a dead one."""
    body = """
    tree = {"n": np.arange(3), "x": put(np.arange(14.0), P("x"))}
    errors = [caught(tr.save, tmp / "a", {**tree, "n": np.arange(3) + (INDEX == 6)})]
    errors.append(caught(tr.save, tmp / "a", {**tree, **({"o": object()} if INDEX == 5 else {"o": 1})}))
    errors.append(caught(tr.save, tmp / "a", tree))
    if INDEX == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    errors.append(caught(tr.save, tmp / "b", tree, timeout=3))
    report(errors)
    while INDEX == 0 and not all((tmp / f"report-{n}.json").exists() for n in (1, 2, 3, 5, 6)):
        time.sleep(0.1)
    time.sleep(1 if INDEX == 0 else 0)  # JAX ends the others when process 0 is gone
    """
    options = {"before": TWO_CHILDREN, "recoverable": True, "timeout": 240}
    results = run_job(tmp_path, _dedented(body), processes=7, devices=2, expect={4: KILLED}, **options)
    for index, result in enumerate(results):
        if index == 4:
            continue
        differs, refused, fine, dead = result.report
        assert differs[0] == "MismatchError" and "n: process 0 has" in differs[1] and "process 6" in differs[1]
        assert refused[0] == "UnsupportedError" and "builtins.object" in refused[1]
        assert fine is None
        assert dead[0] == "PeerError" and "process 4" in dead[1], dead


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize(("victim", "role"), [(1, "_Speaker"), (4, "_Relayed")])
def test_tree_relays_signs_of_life_of_a_host(tmp_path: pathlib.Path, victim: int, role: str) -> None:
    """One process of a host passes on the signs of all, and the death of either kind of process is noticed."""
    body = """
    tree = {"n": np.arange(3), "x": put(np.arange(12.0, dtype=np.float32), P("x"))}
    tr.save(tmp / "warm", tree)
    sync("warm")
    given.clear()
    time.sleep([1, 0, 1, 1, 1, 5][INDEX])  # process 1 comes first, and all wait for process 5
    tr.save(tmp / "a", tree)
    signs = len(given)
    sync("a")
    time.sleep([1, 0, 1, 1, 1, 4][INDEX])
    if INDEX == VICTIM:
        threading.Timer(2.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        (tmp / "role").write_text(roles[-1])
    report([signs, roles[-1], caught(tr.save, tmp / "b", tree, timeout=4)])
    while INDEX == 0 and sum((tmp / f"report-{n}.json").exists() for n in range(6)) < 5:
        time.sleep(0.1)
    time.sleep(1 if INDEX == 0 else 0)  # JAX ends the others when process 0 is gone
    """
    options = {"before": BY_HOST, "recoverable": True, "timeout": 120, "VICTIM": victim}
    results = run_job(tmp_path, _dedented(body), processes=6, devices=2, expect={victim: KILLED}, **options)
    assert (tmp_path / "role").read_text() == role
    for index, (_, found, _) in enumerate(results):
        if index == victim:
            continue
        signs, _, error = found
        assert error[0] == "PeerError" and f"process {victim} (last seen" in error[1], error
        assert signs > 1 if index in (0, 1) else not signs, (index, signs)


@pytest.mark.long
@pytest.mark.whole
def test_who_gets_no_answer_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose listening process does not answer puts its sign into the store itself."""
    monkeypatch.setattr(host_relay, "_UNANSWERED_SECONDS", 0.5)
    name = secrets.token_hex(8)
    first, second, third = (host_relay.join_host(name) for _ in range(3))
    assert first and second and third
    assert second.signs(1, "a") == {} and third.signs(2, "a") == {}
    assert first.signs(0, "a") == {0: "a", 1: "a", 2: "a"}
    assert second.signs(1, "b") == {}
    third._speaker.close()  # type: ignore[attr-defined]
    assert first.signs(0, "b") == {0: "b", 1: "b", 2: "a"}, "what a dead one has said stays, and is not renewed"
    fourth = host_relay.join_host(name)
    assert fourth and fourth.signs(3, "a") == {} and first.signs(0, "b")[3] == "a"
    fourth.close()
    assert 3 not in first.signs(0, "b"), "it has left"
    assert second.signs(1, "c") == {}
    time.sleep(0.6)
    assert second.signs(1, "d") == {1: "d"}
    assert first.signs(0, "c")[1] == "d" and second.signs(1, "e") == {}
    first.close()
    assert second.signs(1, "g") == {1: "g"}
    second.close()


def test_signs_that_a_process_gives_itself_and_others_for_it() -> None:
    """A process may have two signs, its own and one that a peer passed on. An error replaces both."""
    found = {
        3: host_relay.encode_signs(6.0, {3: "7 writing", 4: "2 writing", 5: "1 beginning"}),
        4: "0 beginning",
        5: "failed x",
    }
    signs, every = host_relay.decode_signs(found)
    assert signs == {3: "7 writing", 4: "0 beginning, 2 writing", 5: "failed x"} and every == {3: 6.0}


class _Values(dict[str, str]):
    """A fake store of a job, with some of the methods of JAX's client."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self[key] = value

    def key_value_try_get(self, key: str) -> str:
        if key not in self:
            raise RuntimeError("NOT_FOUND")
        return self[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [item for item in self.items() if item[0].startswith(key)]


def test_how_long_a_silence_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silence means death sooner if a peer passes on the signs. A job that was suspended as one stays alive."""
    now, values = 0.0, _Values()
    monkeypatch.setattr(multi_process, "time", types.SimpleNamespace(monotonic=lambda: now))
    call = multi_process.MultiProcessCall(values, 0, 100_000, "save", 30, History())
    values[f"{call.name}/heartbeat/0/3"] = host_relay.encode_signs(8.25, {3: "1 writing", 4: "1 writing"})
    values[f"{call.name}/heartbeat/0/5"] = "1 writing"
    call._check([3, 4, 5])
    for now in (10_000, 20_000, 30_000):  # noqa: B007
        call._check([3, 4, 5])
    values[f"{call.name}/heartbeat/0/3"] = host_relay.encode_signs(8.25, {3: "2 writing", 4: "1 writing"})
    for _ in range(3):
        now += 2.5
        call._check([3, 4, 5])
    now += 2.5
    with pytest.raises(PeerError, match=r"nothing heard for 33 s from process 4 \(last seen writing\);"):
        call._check([3, 4, 5])
    values[f"{call.name}/heartbeat/0/4"] = "5 writing"  # it puts its own sign now, less often
    for _ in range(19):
        now += 10
        call._check([4])
    now += 25
    with pytest.raises(PeerError, match="nothing heard for 200 s from process 4"):
        call._check([4])


@pytest.mark.long
def test_a_simulated_job_agrees_and_misses_the_dead() -> None:
    outcome = simulation.simulate(80)
    assert outcome.values_read == 64
    assert outcome.agreed < 3 and outcome.noticed < 45
    assert outcome.calm <= 1.1 * 80


def _dedented(body: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in body.splitlines())
