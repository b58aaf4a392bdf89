"""Train, get killed in the middle of a save, resume, and end with the same weights to the last bit.

A small character-level transformer learns the text of Python's own standard library. One run is not interrupted. The
other is killed (SIGKILL) while a checkpoint is half written, and started again. Run it with `make demo`.
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

STEPS, SAVE_EVERY, KILL_AFTER = 50, 10, 25


def train(run: str) -> None:
    """Trains the model. The three marked lines are all that concerns checkpoints."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax
    from digest import digest
    from model import Transformer, batch, load_text

    import treering as tr

    text = load_text()
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, STEPS))

    def init():
        model = Transformer(vocabulary=128, width=128, heads=4, depth=2, context=32, key=jax.random.key(0))
        return model, optimizer.init(eqx.filter(model, eqx.is_array)), jax.random.key(1)

    def loss_of(model, tokens):
        logits = jax.vmap(model)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @eqx.filter_jit(donate="all")
    def train_step(state, tokens):
        model, moments, key = state
        loss, gradients = eqx.filter_value_and_grad(loss_of)(model, tokens)
        updates, moments = optimizer.update(gradients, moments, eqx.filter(model, eqx.is_array))
        return (eqx.apply_updates(model, updates), moments, jax.random.fold_in(key, 1)), loss

    with tr.Checkpointer(run, save_every=SAVE_EVERY, keep=tr.keep.last(2)) as ckpts:  # ← 1
        state, step = ckpts.restore_or_init(init)  # ← 2
        print("begin", step, flush=True)
        for step in range(step + 1, STEPS + 1):
            state, loss = train_step(state, jnp.asarray(batch(text, step, size=8, length=33)))
            print("loss", step, float(loss), flush=True)
            ckpts.save(step, state, metrics={"loss": loss})  # ← 3

    print("digest", digest(state[0]), flush=True)


def half_written(run: pathlib.Path) -> str | None:
    """Returns the name of a step whose arrays are on the disk while its manifest is not."""
    for step in sorted(run.glob("step-*")) if run.exists() else ():
        names = os.listdir(step)
        if any(name.startswith("arrays-") for name in names) and "treering.json" not in names:
            return step.name
    return None


def watch(run: pathlib.Path, losses: dict[int, float], kill_after: int | None) -> str | None:
    """Runs the training program to its end. With `kill_after`, kills it in the middle of a save after that step."""
    program = [sys.executable, __file__, "train", str(run)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            kind, *values = line.split()
            if kind == "begin":
                print(f"  begins at step {values[0]}")
            elif kind == "digest":
                return values[0]
            else:
                losses[int(values[0])] = float(values[1])
                if kill_after and int(values[0]) >= kill_after:
                    break
        else:
            raise SystemExit("the training program failed")
        while not (name := half_written(run)):  # It saves in the background and continues training.
            if process.poll() is not None:
                raise SystemExit("the training program ended before it could be killed")
            time.sleep(0.0002)
        process.send_signal(signal.SIGKILL)
    if half_written(run) != name:  # It was committed just before the kill, so try again.
        return watch(run, losses, kill_after)
    print(f"  killed in the middle of saving {name}")
    return None


def plot(losses: dict[int, float], width: int = 60, height: int = 8) -> str:
    """Returns a chart of the loss over the steps, in characters."""
    steps = sorted(losses)
    columns = [losses[steps[i * (len(steps) - 1) // (width - 1)]] for i in range(width)]
    top, bottom = max(columns), min(columns)
    at = [round((top - value) / (top - bottom) * (height - 1)) for value in columns]
    lines = []
    for row in range(height):
        label = top - (top - bottom) * row / (height - 1)
        lines.append(f"  {label:5.2f} ┤" + "".join("●" if there == row else " " for there in at).rstrip())
    return "\n".join(lines)


def main() -> None:
    import safetensors.numpy

    import treering as tr

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="treering-demo-") as folder:
        peaceful, killed = pathlib.Path(folder, "peaceful"), pathlib.Path(folder, "killed")
        losses: dict[int, float] = {}
        print(f"A run of {STEPS} steps without an interruption:")
        expected = watch(peaceful, losses, None)
        print(plot(losses))
        print("\nThe same run, killed with SIGKILL while it saves:")
        watch(killed, {}, KILL_AFTER)
        print(f"  committed steps: {tr.steps(killed)}; verified: {tr.verify(killed).ok}")
        print("Started again:")
        found = watch(killed, {}, None)
        print(f"\n  sha256 of the weights, uninterrupted: {expected}")
        print(f"  sha256 of the weights, killed once:   {found}")
        print(f"  bit-identical: {found == expected}")

        step = tr.open(killed).path
        (arrays,) = pathlib.Path(step).glob("*.safetensors")
        tensors = safetensors.numpy.load_file(arrays)
        print(f"\nThe arrays of {pathlib.Path(step).name}, opened with the safetensors package: {len(tensors)} tensors")
        for name in sorted(tensors)[:4]:
            print(f"  {name:40} {tensors[name].dtype} {tensors[name].shape}")
        if found != expected:
            raise SystemExit("the weights differ")
    print(f"\nThis took {time.perf_counter() - begun:.0f} s.")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2])
    else:
        main()
