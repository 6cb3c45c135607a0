"""Log files for tests: verl's JSONL as verl writes it, offline runs made by wandb itself.

    write_verl_log(folder / "grpo" / "qwen.jsonl", [(1, {"actor/pg_loss": 0.5})])
    make_offline_run(folder, "abc", range(30), attempt=1)
    make_offline_run(folder, "abc", range(20, 50), attempt=2, resume="allow")

Starting a process with wandb in it takes a second or two: `make_offline_runs` makes many runs
in one.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

__all__ = ["OfflineRun", "make_offline_run", "make_offline_runs", "write_verl_log"]

#: Every so many rows a rich run logs media.
MEDIA_EVERY: Final = 10

_HEADER: Final = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
_BLOCK: Final = 32768
# The client writes its buffer to disk every 15 seconds; a killed run holds what was written.
_FLUSHED_WITHIN: Final = 30.0


def write_verl_log(path: Path, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> Path:
    """Write a file as verl's `file` logger does: `{"step":1,"data":{...}}` a line.

    Args:
        path: `PROJECT/EXPERIMENT.jsonl`; its folders are made.
        rows: (step, metrics) pairs, in file order. NaN and infinities become the bare tokens
            of verl before 0.7.1; give None for the `null` that later versions write.

    Returns:
        The path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        for step, data in rows:
            record = {"step": step, "data": dict(data)}
            stream.write(json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n")
    return path


@dataclass(frozen=True)
class OfflineRun:
    """An offline run to be made. Every row holds `attempt` and two metrics.

    Args:
        folder: the run folder is made in its `wandb/`, under a name of its own.
        run_id: W&B's run id.
        steps: the steps to log, in this order.
        attempt: logged in every row, to tell whose row it is.
        resume: `resume=` of `wandb.init`.
        finish: False kills the logging process with SIGKILL, so that there is no exit record.
        project: the W&B project.
        name: the run's display name.
        config: the run's config.
        rich: with console lines, system metrics and metric definitions; every tenth row with
            a table, an image and a histogram; and with one artifact.
        start: when the run began (seconds since 1970). wandb's clock cannot be set, so times
            (nothing else) are rewritten in the finished file. None leaves the true times.
        step_seconds: time between rows; only used with `start`.
    """

    folder: Path
    run_id: str
    steps: Sequence[int]
    attempt: int = 1
    resume: str | None = None
    finish: bool = True
    project: str = "grpo_arith"
    name: str = "qwen_small_grpo"
    config: Mapping[str, Any] = field(default_factory=dict)
    rich: bool = False
    start: float | None = None
    step_seconds: float = 10.0


def make_offline_run(
    folder: Path,
    run_id: str,
    steps: Sequence[int],
    *,
    attempt: int = 1,
    resume: str | None = None,
    finish: bool = True,
    project: str = "grpo_arith",
    name: str = "qwen_small_grpo",
    config: Mapping[str, Any] | None = None,
    rich: bool = False,
    start: float | None = None,
    step_seconds: float = 10.0,
) -> Path:
    """Make one offline run with the wandb package that is installed; see `OfflineRun`.

    Returns:
        Its folder, `folder/wandb/offline-run-DATE_TIME-ID`.
    """
    spec = OfflineRun(
        folder,
        run_id,
        steps,
        attempt,
        resume,
        finish,
        project,
        name,
        config or {},
        rich,
        start,
        step_seconds,
    )
    return make_offline_runs([spec])[0]


def make_offline_runs(specs: Sequence[OfflineRun]) -> list[Path]:
    """Make several offline runs in as few processes as possible.

    All killed runs (`finish=False`) share one more process, which takes some 15 seconds: so
    long the client keeps its rows in memory.

    Returns:
        Their folders, in the order of `specs`.
    """
    folders: dict[int, Path] = {}
    for finish in (True, False):
        chosen = {n: spec for n, spec in enumerate(specs) if spec.finish is finish}
        if chosen:
            folders.update(zip(chosen, _make(list(chosen.values())), strict=True))
    return [folders[number] for number in range(len(specs))]


def _make(specs: Sequence[OfflineRun]) -> Iterator[Path]:
    home = specs[0].folder
    home.mkdir(parents=True, exist_ok=True)
    # Artifacts' files stay in the client's staging folder, so that has to stay too.
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=home))
    orders = [
        {**asdict(s), "folder": str(scratch / str(n)), "steps": list(s.steps)}
        for n, s in enumerate(specs)
    ]
    package = str(Path(__file__).resolve().parents[2])
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    env |= {f"WANDB_{n}_DIR": str(scratch / "client") for n in ("CACHE", "CONFIG", "DATA")}
    env |= {
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_SILENT": "true",
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(orders),
        capture_output=True,
        text=True,
        env=env,
        cwd=scratch,
        check=False,
    )
    if done.returncode != (0 if specs[0].finish else -signal.SIGKILL):
        raise RuntimeError(f"wandb made no run: {done.stderr[-2000:]}")
    for number, spec in enumerate(specs):
        (made,) = (scratch / str(number) / "wandb").glob("offline-run-*")
        if spec.start is not None:
            (log,) = made.glob("*.wandb")
            _retime(log, spec.start, spec.step_seconds)
        yield _moved(made, spec)
        shutil.rmtree(scratch / str(number))


def _moved(made: Path, spec: OfflineRun) -> Path:
    """Give a run folder its place, under the next free second where two started in one."""
    started = datetime.strptime(made.name[12:27], "%Y%m%d_%H%M%S").timestamp()
    second = int(spec.start if spec.start is not None else started)
    (spec.folder / "wandb").mkdir(parents=True, exist_ok=True)
    while True:
        stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(second))
        place = spec.folder / "wandb" / f"offline-run-{stamp}-{spec.run_id}"
        if not place.exists():
            shutil.move(made, place)
            return place
        second += 1


# -- in the child process ------------------------------------------------------------------


def _child(orders: Sequence[Mapping[str, Any]]) -> None:
    wandb: Any = importlib.import_module("wandb")
    for order in orders:
        Path(order["folder"]).mkdir(parents=True)
        run = wandb.init(
            id=order["run_id"],
            project=order["project"],
            name=order["name"],
            config=order["config"],
            resume=order["resume"],
            dir=order["folder"],
            mode="offline",
            reinit="create_new",
            settings=wandb.Settings(
                console="wrap" if order["rich"] else "off",
                x_disable_stats=not order["rich"],
                x_disable_meta=not order["rich"],  # without it there are no system metrics
                x_disable_machine_info=not order["rich"],
                x_stats_sampling_interval=0.1,
                save_code=False,
                silent=True,
            ),
        )
        _log(wandb, run, order)
        if order["finish"]:
            run.finish()
    unfinished = [order for order in orders if not order["finish"]]
    if unfinished:
        for order in unfinished:
            _wait_until_written(Path(order["folder"]), len(order["steps"]))
        os.kill(os.getpid(), signal.SIGKILL)


def _log(wandb: Any, run: Any, order: Mapping[str, Any]) -> None:
    attempt, rich = order["attempt"], order["rich"]
    if rich:
        run.define_metric("training/global_step")
        run.define_metric("critic/*", step_metric="training/global_step", summary="max")
    for number, step in enumerate(order["steps"]):
        row = {
            "attempt": attempt,
            "critic/score/mean": attempt + step / 1000,
            "training/global_step": step,
        }
        if rich:
            print(f"step:{step} - attempt:{attempt}", flush=True)  # noqa: T201 - for its console
            if number % MEDIA_EVERY == 0:
                row |= _media(wandb, step)
            time.sleep(0.03)  # so that system metrics are sampled in between
        run.log(row, step=step, commit=True)
    if rich:
        artifact = wandb.Artifact(f"notes-{order['run_id']}", type="dataset")
        with artifact.new_file("notes.txt") as stream:
            stream.write(f"notes of {order['run_id']}")
        run.log_artifact(artifact)
        time.sleep(0.5)


def _media(wandb: Any, step: int) -> dict[str, Any]:
    numpy: Any = importlib.import_module("numpy")
    pixels = numpy.full((4, 4, 3), step % 256, dtype=numpy.uint8)
    table = wandb.Table(columns=["prompt", "score"], data=[["1+1=", 1.0], [f"{step}+1=", 0.0]])
    return {
        "val/generations": table,
        "val/picture": wandb.Image(pixels),
        "response_length/hist": wandb.Histogram([step, step + 1, step + 3]),
    }


def _wait_until_written(folder: Path, rows: int) -> None:
    proto: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (log,) = folder.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + _FLUSHED_WITHIN
    while True:
        records = map(proto.Record.FromString, _payloads(log.read_bytes()))
        if sum(record.WhichOneof("record_type") == "history" for record in records) >= rows:
            return
        if time.monotonic() > end:
            raise TimeoutError(f"the client did not write all rows within {_FLUSHED_WITHIN} s")
        time.sleep(0.2)


# -- times ---------------------------------------------------------------------------------


def _retime(path: Path, start: float, step_seconds: float) -> None:
    """Rewrite the times of a log: row n (from 1) happens n * step_seconds after the start."""
    proto: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    payloads: list[bytes] = []
    shift = None
    rows = 0
    for payload in _payloads(path.read_bytes()):
        record = proto.Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            shift = shift if shift is not None else start - _seconds(record.run.start_time)
            _set_seconds(record.run.start_time, start)
        elif kind == "stats" and shift is not None:
            _set_seconds(record.stats.timestamp, _seconds(record.stats.timestamp) + shift)
        elif kind == "history":
            rows += 1
            _set_items(record.history.item, start, rows * step_seconds)
        elif kind == "summary":
            _set_items(record.summary.update, start, rows * step_seconds)
        payloads.append(record.SerializeToString())
    path.write_bytes(_framed(payloads))


def _seconds(stamp: Any) -> float:
    return float(stamp.seconds) + float(stamp.nanos) / 1e9


def _set_seconds(stamp: Any, seconds: float) -> None:
    stamp.seconds, stamp.nanos = int(seconds), int(seconds % 1 * 1e9)


def _set_items(items: Iterable[Any], start: float, elapsed: float) -> None:
    values = {"_timestamp": start + elapsed, "_runtime": elapsed}
    for item in items:
        key = item.key or "/".join(item.nested_key)
        if key in values:
            item.value_json = json.dumps(values[key])


def _payloads(data: bytes) -> Iterator[bytes]:
    """The records of an undamaged log (LevelDB's framing); a cut last one is left out."""
    place = len(_HEADER)
    parts: list[bytes] = []
    while place + 7 <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        piece = data[place + 7 : place + 7 + length]
        if len(piece) < length:
            return
        parts.append(piece)
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []
        place += 7 + length


def _framed(payloads: Iterable[bytes]) -> bytes:
    out = bytearray(_HEADER)
    for payload in payloads:
        rest, first = payload, True
        while True:
            left = _BLOCK - len(out) % _BLOCK
            if left < 7:
                out += bytes(left)
                left = _BLOCK
            piece, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if first else 4) if not rest else (2 if first else 3)
            checksum = zlib.crc32(bytes([kind]) + piece)
            out += struct.pack("<IHB", checksum, len(piece), kind) + piece
            first = False
            if not rest:
                break
    return bytes(out)


if __name__ == "__main__":
    _child(json.load(sys.stdin))
