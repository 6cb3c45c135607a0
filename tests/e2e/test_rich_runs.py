"""What an offline run holds besides metrics arrives once, however often it is uploaded."""

from __future__ import annotations

from collections import Counter

import pytest
from wandb.proto import wandb_internal_pb2 as pb

from verl_logsync.discover import discover
from verl_logsync.sources.offline_run import OfflineRun, console_lines
from verl_logsync.testing.builders import make_offline_run
from verl_logsync.transaction_log import Entry, TransactionLogWriter, read_records

RUN_ID = "richrun1"
IMAGE, TABLE = "media/images/val/", "media/table/val/"


@pytest.fixture
def records(offline_run, log_of):
    """The folder of a rich run, its bytes, and its records."""
    folder = offline_run("rich_0_29")
    log = log_of(folder)
    found = [entry for entry in read_records(log) if isinstance(entry, Entry)]
    return log, log.read_bytes(), found


@pytest.fixture
def assert_complete(server, one_run, records):
    """Everything is on the server, once."""
    _, _, found = records
    kinds = Counter(entry.kind for entry in found)
    console = "".join(e.record.output_raw.line for e in found if e.kind == "output_raw")
    versions = Counter(e.record.artifact.name for e in found if e.kind == "artifact")
    assert sorted(versions.values()) == [1, 3]  # the notes, and a table at three steps
    assert kinds["stats"] >= 3
    assert kinds["artifact"] == 4
    assert console.count("\n") == 30

    def check():
        run = one_run()
        assert [row["_step"] for row in run.rows] == list(range(30))
        assert len(run.events) == kinds["stats"]
        assert len({str(event) for event in run.events}) == kinds["stats"]
        texts = [line.rstrip("\n").split(" ", 1)[1] for line in run.logs]
        assert texts == console.splitlines()
        for row in run.rows[::10]:
            assert row["val/generations"]["_type"] == "table-file"
            assert row["val/picture"]["_type"] == "image-file"
            assert row["response_length/hist"]["_type"] == "histogram"
            for key in ("val/generations", "val/picture"):
                assert row[key]["path"] in run.files
        assert sum(name.startswith(IMAGE) for name in run.files) == 3
        assert sum(name.startswith(TABLE) for name in run.files) == 3
        assert Counter(a.name for a in server.artifacts) == versions
        assert {a.state for a in server.artifacts} == {"COMMITTED"}
        (notes,) = [a for a in server.artifacts if a.type == "dataset"]
        assert notes.files == {"notes.txt": f"notes of {RUN_ID}".encode()}
        assert run.state == "finished"
        assert run.gaps == []
        assert run.overwrites == []

    return check


def test_media_console_and_system_metrics_arrive_once(upload, outputs, assert_complete, server):
    """System metrics, console lines, table, image, histogram and artifact arrive once."""
    assert upload(outputs).code == 0
    assert_complete()
    assert upload.here(outputs).rows_sent == 0
    upload.from_another_machine()
    assert upload.here(outputs).rows_sent == 0
    assert_complete()


def test_they_cross_an_air_gap(upload, outputs, tmp_path, assert_complete, log_of):
    """What --mode offline wrote is whole: nothing in it points to files of the machine it is from."""
    assert upload.here(outputs, mode="offline", output=tmp_path / "out").code == 0
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    (folder,) = moved.iterdir()
    for entry in read_records(log_of(folder)):
        if isinstance(entry, Entry) and entry.kind == "artifact":
            places = [item.local_path for item in entry.record.artifact.manifest.contents]
            assert all((folder / place).is_file() for place in places)
            assert not any(place.startswith("/") for place in places)
    upload.from_another_machine()
    assert upload.here(moved).code == 0
    assert_complete()


def test_they_arrive_once_over_two_appends(
    records, upload, outputs, age, assert_complete, server, one_run
):
    """A run that is uploaded while it grows, in three parts, ends like one uploaded at once."""
    log, whole, found = records
    rows = [n for n, entry in enumerate(found) if entry.kind == "history"]
    sent = []
    for count in (8, 19):
        end = found[rows[count] + 1].offset
        log.write_bytes(whole[:end])
        # Not fresh, not over: its newest row is complete, and it is still running.
        age(outputs, seconds=600)
        part = upload.here(outputs)
        assert part.code == 0, part.only["account"]["skips"]
        sent.append(part.rows_sent)
        assert one_run().state == "running"
    log.write_bytes(whole)
    last = upload.here(outputs)
    assert last.code == 0
    assert [*sent, last.rows_sent] == [9, 11, 10]
    assert_complete()
    assert upload.here(outputs).rows_sent == 0
    assert_complete()


def test_metric_definitions_survive_an_append(records, upload, outputs, age, one_run):
    """An append does not wipe the metric definitions that the first upload brought."""
    log, whole, found = records
    rows = [n for n, entry in enumerate(found) if entry.kind == "history"]
    log.write_bytes(whole[: found[rows[8] + 1].offset])
    age(outputs, seconds=600)
    upload.here(outputs)
    defined = one_run().raw_config["_wandb"]["value"]["m"]
    assert len(defined) >= 2
    log.write_bytes(whole)
    upload.here(outputs)
    assert one_run().raw_config["_wandb"]["value"]["m"] == defined


def test_a_resumed_rich_run_keeps_both_consoles(upload, outputs, tmp_path, one_run):
    """Console lines and system metrics of both attempts are there, once, in order."""
    from verl_logsync.testing.builders import OfflineRun, make_offline_runs

    make_offline_runs(
        [
            OfflineRun(outputs, "twice", range(10), 1, rich=True),
            OfflineRun(outputs, "twice", range(6, 14), 2, rich=True, resume="allow"),
        ]
    )
    result = upload(outputs)
    assert result.code == 0
    run = one_run()
    assert [row["attempt"] for row in run.rows] == [1] * 6 + [2] * 8
    texts = [line.rstrip("\n").split(" ", 1)[1] for line in run.logs]
    assert texts == [f"step:{step} - attempt:1" for step in range(10)] + [
        f"step:{step} - attempt:2" for step in range(6, 14)
    ]


def test_secrets_in_the_console_of_an_offline_run_stay(outputs, upload, one_run):
    """What an offline run recorded of the console, its files and its command line arrives without
    the keys in it."""
    secret = "sk-very-secret-0123456789abcdef"
    folder = make_offline_run(outputs, "rich", range(5), rich=True)
    (log,) = folder.glob("*.wandb")
    texts = [f"{{'judge': {{'api_key': '{secret}'}}}}\n", f"'api_key': '{secret}'\n"]
    records = [
        pb.Record(output_raw=pb.OutputRawRecord(line=text)).SerializeToString() for text in texts
    ]
    payloads = [entry.payload for entry in read_records(log) if isinstance(entry, Entry)]
    with TransactionLogWriter(log) as writer:
        for payload in (*payloads[:-1], *records, payloads[-1]):
            writer.write_payload(payload)
    (folder / "files" / "output.log").write_text("".join(texts))
    (folder / "files" / "config.yaml").write_text(f"api_key:\n  value: {secret}\n")
    assert upload.here(outputs, final=True).code == 0
    run = one_run()
    held = repr(run.logs) + repr(run.config) + repr(run.files)
    assert "api_key" in held
    assert secret not in held


ODD_LINES = (
    "",
    "   ",
    "\r",
    "bar  10%\rbar 100%",
    "\x1b[31mred\x1b[0m",
    "up\x1b[A",
    "\x1b[2A\x1b[K\x1b[?25l",
    "escape\x1b",
    "bracket\x1b[",
    "\x1b\x1b[A",
    "\x1b\x1b[K[A",
    "\x1b[B\x1b[B\x1b[B",
    *[""] * 70,
    "tab\t\x0b\x0c\x07\x08\x00 é 漢 \u2028 \U0001f600",
    "x" * 10_000,
    "last",
    "",
    "",
)


def test_every_console_line_is_one_line_there(offline_run, log_of, outputs, upload, one_run):
    """Whatever is printed, blank lines at the end included: as many lines arrive as were meant."""
    log = log_of(offline_run("first_0_29"))
    payloads = [entry.payload for entry in read_records(log) if isinstance(entry, Entry)]
    with TransactionLogWriter(log) as writer:
        for payload in payloads:
            writer.write_payload(payload)
        for number, line in enumerate(ODD_LINES):
            raw = pb.OutputRawRecord(line=f"{line}\n", output_type=number % 2)
            writer.write_payload(pb.Record(output_raw=raw).SerializeToString())
    assert upload.here(outputs, final=True).code == 0
    again = upload.here(outputs, final=True)
    assert (again.code, again.rows_sent) == (0, 0)
    lines = [line.rstrip("\n").split(" ", 1)[1] for line in one_run().logs]
    assert lines[-3:] == ["last", "", ""]
    assert lines.count("") >= 70


def test_a_run_that_died_before_its_first_step_is_new(offline_run, log_of, outputs, upload):
    """What a run printed before it died arrives as a new run, with a warning; then it is there."""
    log = log_of(offline_run("first_0_29"))
    found = [entry for entry in read_records(log) if isinstance(entry, Entry)]
    raw = pb.OutputRawRecord(line="CUDA out of memory\n")
    with TransactionLogWriter(log) as writer:
        for entry in found:
            if entry.kind not in ("history", "stats", "output_raw"):
                writer.write_payload(entry.payload)
        writer.write_payload(pb.Record(output_raw=raw).SerializeToString())
    first, again = upload.here(outputs, final=True), upload.here(outputs, final=True)
    assert (first.code, first.only["action"]) == (3, "new")
    assert (again.code, again.only["action"]) == (3, "nothing to do")


def test_nested_progress_bars_are_as_on_a_screen() -> None:
    """Bars that move up to rewrite their lines are one line each, as W&B itself shows them."""
    chunks = ["epoch 0%\n", "step 0%"]
    for number in range(1, 4):
        chunks += ["\x1b[A", f"\repoch {number}%", "\n", f"\rstep {number}0%"]
    chunks += ["\n", "done\r\n", "\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A", "\rtop", "\n", "\n"]
    assert console_lines(chunks) == (("top", "step 30%", "done"), "")
    assert console_lines(["a\r\n", "b 1\rb 2\r", "\n", "", "\n"]) == (("a", "b 2", ""), "")


def test_what_is_printed_after_the_last_row_hides_no_step(offline_run, log_of, outputs):
    """The last step of an offline run is known, however much was printed after training."""
    log = log_of(offline_run("first_0_29"))
    line = pb.Record(output_raw=pb.OutputRawRecord(line="x" * 200)).SerializeToString()
    payloads = [entry.payload for entry in read_records(log) if isinstance(entry, Entry)]
    with TransactionLogWriter(log) as writer:
        for payload in (*payloads, *[line] * 20_000):
            writer.write_payload(payload)
    (file,) = discover([outputs], [OfflineRun()]).files
    assert (file.facts.first_step, file.facts.last_step) == (0, 29)


def test_what_is_printed_before_the_first_row_hides_no_step(offline_run, log_of, outputs):
    """The steps of an offline run are known, however much was printed until training began."""
    log = log_of(offline_run("first_0_29"))
    line = pb.Record(output_raw=pb.OutputRawRecord(line="loading\n")).SerializeToString()
    payloads = [entry.payload for entry in read_records(log) if isinstance(entry, Entry)]
    with TransactionLogWriter(log) as writer:
        for payload in (payloads[0], *[line] * 5000, *payloads[1:]):
            writer.write_payload(payload)
    (file,) = discover([outputs], [OfflineRun()]).files
    assert (file.facts.first_step, file.facts.last_step) == (0, 29)
    assert file.facts.training_digest
