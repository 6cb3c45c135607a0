"""The loopback server against the real wandb clients."""

from __future__ import annotations

import base64
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
import wandb

from verl_logsync.testing import Fault, LoopbackServer
from verl_logsync.testing.loopback import Request, StoredRun

ENTITY, PROJECT = "loopback", "grpo"
KEY = "k" * 40
BOUNDED_RETRIES = {
    "WANDB_X_FILE_STREAM_RETRY_MAX": "3",
    "WANDB_X_FILE_STREAM_RETRY_WAIT_MIN_SECONDS": "1",
    "WANDB_X_FILE_STREAM_RETRY_WAIT_MAX_SECONDS": "1",
    "WANDB_X_GRAPHQL_RETRY_MAX": "1",
    "WANDB_X_GRAPHQL_RETRY_WAIT_MIN_SECONDS": "1",
    "WANDB_X_GRAPHQL_RETRY_WAIT_MAX_SECONDS": "1",
    "WANDB_X_FILE_TRANSFER_RETRY_MAX": "1",
    "WANDB_X_FILE_TRANSFER_RETRY_WAIT_MIN_SECONDS": "1",
    "WANDB_X_FILE_TRANSFER_RETRY_WAIT_MAX_SECONDS": "1",
}

MakeOffline = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def _wandb_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    home = tmp_path_factory.mktemp("wandb-home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR", "ARTIFACT_DIR"):
            folder = home / name.lower()
            folder.mkdir()
            patch.setenv(f"WANDB_{name}", str(folder))
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("WANDB_X_DISABLE_STATS", "true")
        for name, value in BOUNDED_RETRIES.items():
            patch.setenv(name, value)
        for name in ("WANDB_BASE_URL", "WANDB_API_KEY", "WANDB_RESUME", "WANDB_MODE"):
            patch.delenv(name, raising=False)
        yield
        wandb.teardown()


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer() as running:
        yield running


@pytest.fixture
def online(server: LoopbackServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackServer]:
    """Point the client in this very process to the server."""
    # The client reads its environment once and keeps a service process that knows it.
    wandb.teardown()
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    yield server
    wandb.teardown()


def offline(run_id: str, steps: range, **arguments: Any) -> Path:
    """Write an offline run with one value a step and return its folder."""
    run = wandb.init(project=PROJECT, mode="offline", id=run_id, **arguments)
    folder = Path(run.dir).parent
    for step in steps:
        run.log({"x": step * 0.5}, step=step)
    run.finish()
    return folder


@pytest.fixture(scope="module")
def ten_rows(_wandb_home: None) -> Path:
    return offline("ten", range(10), config={"lr": 0.1})


def sync(
    server: LoopbackServer, *folders: Path, beta: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    command = ["beta", "sync"] if beta else ["sync", "--include-synced"]
    return subprocess.run(
        [sys.executable, "-m", "wandb", *command, *map(str, folders)],
        env={**os.environ, **server.env(), "WANDB_SILENT": "false", **env},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )


def stored(server: LoopbackServer, run_id: str) -> StoredRun:
    return server.run(ENTITY, PROJECT, run_id)


def steps(run: StoredRun) -> list[int]:
    return [row["_step"] for row in run.rows]


class Raw:
    """A client without retries, to see single answers."""

    def __init__(self, server: LoopbackServer, key: str = KEY, timeout: float = 5) -> None:
        token = base64.b64encode(f"api:{key}".encode()).decode()
        self.headers = {"Authorization": f"Basic {token}"} if key else {}
        self.connection = HTTPConnection("127.0.0.1", int(server.url.rsplit(":")[-1]), timeout)

    def send(self, method: str, path: str, body: bytes, **headers: str) -> HTTPResponse:
        self.connection.request(method, path, body, {**self.headers, **headers})
        return self.connection.getresponse()

    def graphql(self, query: str, **variables: Any) -> dict[str, Any]:
        body = json.dumps({"query": query, "variables": variables}).encode()
        answer: dict[str, Any] = json.loads(self.send("POST", "/graphql", body).read())
        return answer

    def upsert(self, run_id: str, **values: Any) -> dict[str, Any]:
        return self.graphql(
            "mutation UpsertBucket($input: I!) { upsertBucket(input: $input) {"
            " bucket { name historyLineCount } inserted } }",
            input={"name": run_id, "modelName": PROJECT, **values},
        )

    def stream(self, run_id: str, offset: int, rows: list[Any], **more: Any) -> int:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        files = {"wandb-history.jsonl": {"offset": offset, "content": lines}}
        body = json.dumps({"files": files, **more}).encode()
        answer = self.send("POST", f"/files/{ENTITY}/{PROJECT}/{run_id}/file_stream", body)
        answer.read()
        return answer.status


@pytest.fixture
def raw(server: LoopbackServer) -> Raw:
    client = Raw(server)
    client.upsert("r")
    return client


RUNS_QUERY = """
query VerlLogsyncRuns($entity: String!, $project: String!, $filters: JSONString,
                      $first: Int, $after: String) {
  project(name: $project, entityName: $entity) {
    runs(filters: $filters, first: $first, after: $after) {
      edges { node { ...Counts config summaryMetrics historyKeys historyTail createdAt } }
      pageInfo { endCursor hasNextPage }
    }
  }
}
fragment Counts on Run { id name: name shown: displayName state
  historyLineCount eventsLineCount logLineCount tags notes group jobType heartbeatAt }
"""


def ask_runs(client: Raw, filters: object = None, **variables: Any) -> dict[str, Any]:
    answer = client.graphql(
        RUNS_QUERY, entity=ENTITY, project=PROJECT, filters=json.dumps(filters), **variables
    )
    runs: dict[str, Any] = answer["data"]["project"]["runs"]
    return runs


# Real clients, good weather


def test_online_run_arrives_whole(online: LoopbackServer) -> None:
    """An online run leaves its rows, config, tags, summary, files and final state."""
    config = {"lr": 0.1, "nested": {"a": 1}}
    run = wandb.init(project=PROJECT, id="on", name="shown", tags=["t"], group="g", config=config)
    for step in range(5):
        run.log({"x": step, "bad": float("nan")})
    run.finish()
    found = stored(online, "on")
    assert steps(found) == [0, 1, 2, 3, 4]
    assert (found.state, found.exit_code) == ("finished", 0)
    assert (found.name, found.tags, found.group) == ("shown", ["t"], "g")
    assert found.config == config
    assert found.summary["x"] == 4
    assert {"config.yaml", "wandb-summary.json"} <= found.files.keys()
    assert found.rows[0]["bad"] != found.rows[0]["bad"]
    assert (found.gaps, found.overwrites) == ([], [])


def test_failed_run_is_failed(online: LoopbackServer) -> None:
    """An exit code other than 0 ends a run as failed."""
    run = wandb.init(project=PROJECT, id="bad")
    run.log({"x": 1})
    run.finish(exit_code=3)
    assert (stored(online, "bad").state, stored(online, "bad").exit_code) == ("failed", 3)


def test_offline_folder_syncs(server: LoopbackServer, ten_rows: Path) -> None:
    """`wandb sync` of an offline folder brings its rows once."""
    sync(server, ten_rows)
    assert steps(stored(server, "ten")) == list(range(10))
    assert stored(server, "ten").state == "finished"
    assert server.lines_received == 10


def test_beta_sync(server: LoopbackServer, ten_rows: Path, tmp_path: Path) -> None:
    """`wandb beta sync` is served as well."""
    unsynced = shutil.ignore_patterns("*.synced")
    # The client takes a folder of any other name for an online run and skips it.
    copy = shutil.copytree(ten_rows, tmp_path / ten_rows.name, ignore=unsynced)
    sync(server, copy, beta=True)
    assert steps(stored(server, "ten")) == list(range(10))


def test_syncing_twice_doubles_the_rows(server: LoopbackServer, ten_rows: Path) -> None:
    """Without resume a second sync appends at the true line count: every row twice."""
    sync(server, ten_rows)
    sync(server, ten_rows)
    assert steps(stored(server, "ten")) == [*range(10), *range(10)]
    assert stored(server, "ten").overwrites == []


def test_resume_appends_with_true_steps(server: LoopbackServer, ten_rows: Path) -> None:
    """With WANDB_RESUME=allow later steps are appended under their own numbers."""
    sync(server, ten_rows)
    sync(server, offline("ten", range(12, 15)), WANDB_RESUME="allow")
    assert steps(stored(server, "ten")) == [*range(10), 12, 13, 14]
    assert any(request.operation == "RunResumeStatus" for request in server.requests)


def test_rewind_drops_later_rows(online: LoopbackServer) -> None:
    """`resume_from` cuts the history after its step and goes on from there."""
    run = wandb.init(project=PROJECT, id="rw")
    for step in range(10):
        run.log({"x": step})
    run.finish()
    run = wandb.init(project=PROJECT, resume_from="rw?_step=4")
    run.log({"x": 100})
    run.finish()
    assert [(row["_step"], row["x"]) for row in stored(online, "rw").rows][4:] == [(4, 4), (5, 100)]
    assert stored(online, "rw").rewinds == [(4.0, 5)]


def test_media_and_artifacts(online: LoopbackServer) -> None:
    """Histograms, images, tables and artifacts arrive with their bytes."""
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 4))
    run = wandb.init(project=PROJECT, id="media")
    run.log({"h": wandb.Histogram([1, 2, 3]), "img": wandb.Image(image)})
    run.log({"table": wandb.Table(columns=["a"], data=[[1]])})
    for _ in range(2):
        artifact = wandb.Artifact("weights", type="model")
        with artifact.new_file("w.txt") as file:
            file.write("1 2 3")
        run.log_artifact(artifact)
    run.finish()
    found = stored(online, "media")
    assert found.rows[0]["h"]["_type"] == "histogram"
    assert found.files[found.rows[0]["img"]["path"]].startswith(b"\x89PNG")
    weights = [a for a in online.artifacts if a.name == "weights"]
    assert [(a.state, a.version_index, a.files) for a in weights] == [
        ("COMMITTED", 0, {"w.txt": b"1 2 3"})
    ]
    assert weights[0].created_times == 2
    table = next(a for a in online.artifacts if a.type == "run_table")
    assert table.manifest["contents"].keys() == {"table.table.json"}


@pytest.mark.usefixtures("online")
def test_public_api_reads_back(tmp_path: Path) -> None:
    """`wandb.Api` finds everything that a run logged."""
    run = wandb.init(project=PROJECT, id="back", name="shown", config={"a": {"b": 1}})
    for step in range(3, 8):
        run.log({"x": step, "n": {"m": 1}}, step=step)
    artifact = wandb.Artifact("weights", type="model")
    with artifact.new_file("w.txt") as file:
        file.write("1 2 3")
    run.log_artifact(artifact)
    run.finish()
    found = wandb.Api().run(f"{ENTITY}/{PROJECT}/back")
    assert (found.state, found.name, found.lastHistoryStep) == ("finished", "shown", 7)
    assert found.config == {"a": {"b": 1}}
    runs = wandb.Api().runs(f"{ENTITY}/{PROJECT}", filters={"name": {"$in": ["back"]}})
    assert [(run.id, run.historyLineCount) for run in runs] == [("back", 5)]
    assert found.summary["x"] == 7
    assert found.history_keys["keys"]["x"]["typeCounts"] == [{"type": "number", "count": 5}]
    assert found.history_keys["keys"]["n.m"]["monotonic"] is True
    assert [row["_step"] for row in found.scan_history()] == [3, 4, 5, 6, 7]
    assert [row["x"] for row in found.scan_history(keys=["x"], min_step=5)] == [5, 6, 7]
    assert "config.yaml" in {file.name for file in found.files()}
    (logged,) = [a for a in found.logged_artifacts() if a.type == "model"]
    assert logged.name == "weights:v0"
    assert (Path(logged.download(root=str(tmp_path))) / "w.txt").read_text() == "1 2 3"


def test_public_api_edits_leave_the_state(online: LoopbackServer) -> None:
    """A user's edit of a finished run changes the run and does not re-open it."""
    wandb.init(project=PROJECT, id="edit").finish()
    run = wandb.Api().run(f"{ENTITY}/{PROJECT}/edit")
    run.tags.append("mine")
    run.update()
    assert stored(online, "edit").tags == ["mine"]
    assert stored(online, "edit").state == "finished"
    run.delete()
    assert online.runs == []


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"name": {"$in": ["a", "c"]}}, "ac"),
        ({"display_name": "run b"}, "b"),
        ({"state": {"$eq": "finished"}}, "a"),
        ({"state": "running"}, "bc"),
        ({"config.key.value": "k1"}, "ab"),
        ({"config.key.value": {"$in": ["k2"]}}, "c"),
        ({"config._verl.value.id.deep": "a"}, "a"),
        ({"config.dotted.key.value": 1}, "b"),
        ({"config.lacking.value": "x"}, ""),
        ({"$and": [{"config.key.value": "k1"}, {"state": "running"}]}, "b"),
        ({"$or": [{"name": "a"}, {"name": {"$eq": "c"}}]}, "ac"),
        ({"name": {"$ne": "a"}, "tags": {"$nin": ["t"]}}, "b"),
        ({}, "abc"),
    ],
)
def test_filters(server: LoopbackServer, filters: dict[str, Any], expected: str) -> None:
    """Run filters choose by id, name, state, tags and by config at any depth."""
    client = Raw(server)
    for name, key in (("a", "k1"), ("b", "k1"), ("c", "k2")):
        config = {"key": {"value": key}, "_verl": {"value": {"id": {"deep": name}}}}
        if name == "b":
            config["dotted.key"] = {"value": 1}
        tags = ["t"] if name == "c" else []
        client.upsert(name, displayName=f"run {name}", config=json.dumps(config), tags=tags)
    client.stream("a", 0, [], complete=True, exitcode=0)
    edges = ask_runs(client, filters)["edges"]
    assert "".join(edge["node"]["name"] for edge in edges) == expected


# True line semantics


def test_offset_zero_overwrites(server: LoopbackServer, raw: Raw) -> None:
    """A chunk at offset 0 replaces the first lines and is never appended."""
    raw.stream("r", 0, [{"_step": step, "x": 1} for step in range(4)])
    assert ask_runs(raw)["edges"][0]["node"]["historyKeys"]["keys"]["x"]["typeCounts"]
    raw.stream("r", 0, [{"_step": 10, "y": 1}, {"_step": 11, "y": "s"}])
    run = stored(server, "r")
    assert steps(run) == [10, 11, 2, 3]
    assert run.overwrites == [(0, 2)]
    node = ask_runs(raw)["edges"][0]["node"]
    assert node["historyLineCount"] == 4
    assert node["historyKeys"]["keys"]["x"]["typeCounts"] == [{"type": "number", "count": 2}]
    assert node["historyKeys"]["lastStep"] == 11


def test_gap_stays_visible(server: LoopbackServer, raw: Raw) -> None:
    """A chunk beyond the end is kept where it was sent, and the hole is recorded."""
    raw.stream("r", 0, [{"_step": 0}])
    raw.stream("r", 3, [{"_step": 3}])
    run = stored(server, "r")
    assert (steps(run), run.gaps) == ([0, 3], [(1, 2)])
    assert ask_runs(raw)["edges"][0]["node"]["historyLineCount"] == 4
    raw.stream("r", 1, [{"_step": 1}, {"_step": 2}])
    assert (steps(run), run.overwrites) == ([0, 1, 2, 3], [])


def test_upsert_merges(server: LoopbackServer, raw: Raw) -> None:
    """Config merges at top-level keys; name and tags are kept when absent."""
    first = {"a": {"value": {"x": 1}}, "b": {"value": 1}}
    raw.upsert("r", displayName="first", tags=["t"], notes="n", config=json.dumps(first))
    raw.upsert("r", config=json.dumps({"a": {"value": {"y": 2}}}))
    run = stored(server, "r")
    assert run.config == {"a": {"y": 2}, "b": 1}
    assert (run.name, run.tags, run.notes, run.upserts) == ("first", ["t"], "n", 3)
    raw.upsert("r", displayName="second", tags=["u"])
    assert (run.name, run.tags) == ("second", ["u"])


def test_state_follows_the_run(server: LoopbackServer, raw: Raw) -> None:
    """A run is running, finished or failed by its exit code, and re-opens on an upsert."""
    assert stored(server, "r").state == "running"
    raw.stream("r", 0, [], complete=True, exitcode=0)
    assert stored(server, "r").state == "finished"
    raw.upsert("r")
    assert stored(server, "r").state == "running"
    raw.stream("r", 0, [], complete=True, exitcode=255)
    assert stored(server, "r").state == "failed"


def test_rewind_leaves_everything_but_history(server: LoopbackServer, raw: Raw) -> None:
    """A rewind drops history lines above the step; the summary goes stale."""
    rows = [{"_step": step, "x": step} for step in (0, 5, 10)]
    more = {"wandb-summary.json": {"offset": 0, "content": ['{"_step": 10}']}}
    raw.stream("r", 0, rows)
    raw.send(
        "POST",
        f"/files/{ENTITY}/{PROJECT}/r/file_stream",
        json.dumps({"files": more}).encode(),
    ).read()
    query = """mutation RewindRun($run: String!, $at: Float!) { rewindRun(input: {runName: $run,
      entityName: "loopback", projectName: "grpo", metricName: "_step", metricValue: $at}) {
      rewoundRun { name historyLineCount project { name entity { name } } } } }"""
    answer = raw.graphql(query, run="r", at=5)
    assert answer["data"]["rewindRun"]["rewoundRun"]["historyLineCount"] == 2
    node = ask_runs(raw)["edges"][0]["node"]
    assert json.loads(json.loads(node["historyTail"])[0])["_step"] == 5
    assert node["historyKeys"]["lastStep"] == 5
    assert stored(server, "r").summary == {"_step": 10}
    assert "not found" in raw.graphql(query, run="lacking", at=5)["errors"][0]["message"]


def test_rewind_is_a_capability() -> None:
    """Without rewind the mutation is neither listed nor answered."""
    probe = '{ __type(name: "Mutation") { fields { name } } }'
    for rewind in (True, False):
        with LoopbackServer(rewind=rewind) as server:
            client = Raw(server)
            fields = client.graphql(probe)["data"]["__type"]["fields"]
            assert ({"name": "rewindRun"} in fields) is rewind
            answer = client.graphql('mutation { rewindRun(input: {metricName: "_step"}) { a } }')
            assert ("Cannot query field" in answer["errors"][0]["message"]) is not rewind


def test_deleted_id_is_taken_for_ever(server: LoopbackServer, ten_rows: Path) -> None:
    """A deleted run id answers 409 to every upsert, and sync still exits 0."""
    sync(server, ten_rows)
    server.delete_run("ten")
    result = sync(server, ten_rows)
    assert server.runs == []
    assert "Error initializing run" in result.stderr + result.stdout
    assert {r.status for r in server.requests if r.operation == "UpsertBucket"} == {200, 409}


def test_history_answers_lines(raw: Raw) -> None:
    """`history` gives the lines as sent within [minStep, maxStep), thinned to `samples`."""
    rows = [f'{{"_step":{step},"x":NaN}}' for step in range(100)]
    raw.stream("r", 0, rows)
    query = """query VerlLogsyncHistory($low: Int, $high: Int, $n: Int) {
      project(name: "grpo", entityName: "loopback") { run(name: "r") {
        history(minStep: $low, maxStep: $high, samples: $n) missing } } }"""
    run = raw.graphql(query, low=10, high=20, n=100)["data"]["project"]["run"]
    assert run == {"history": rows[10:20], "missing": None}
    run = raw.graphql(query, low=0, high=100, n=3)["data"]["project"]["run"]
    assert run["history"] == [rows[0], rows[50], rows[99]]


def test_hand_written_queries(server: LoopbackServer, raw: Raw) -> None:
    """Aliases, fragments, paging, directives and unnamed operations are understood."""
    raw.upsert("s")
    first = ask_runs(raw, first=1)
    assert [edge["node"]["shown"] for edge in first["edges"]] == ["r"]
    assert first["pageInfo"]["hasNextPage"]
    second = ask_runs(raw, first=1, after=first["pageInfo"]["endCursor"])
    assert [edge["node"]["name"] for edge in second["edges"]] == ["s"]
    assert raw.graphql("{ viewer { entity username @skip(if: true) } }") == {
        "data": {"viewer": {"entity": ENTITY}}
    }
    raw.send("PUT", f"/storage/run/{ENTITY}/{PROJECT}/r/a%2Fb.txt", b"data").read()
    files = raw.graphql(
        '{ project(name: "grpo", entityName: "loopback") { run(name: "r") {'
        " files(first: 5) { edges { node { name sizeBytes md5 } } }"
        " outputArtifacts { edges { node { id } } } } } }"
    )["data"]["project"]["run"]
    node = {"name": "a/b.txt", "sizeBytes": "4", "md5": "jXd/OF09/siBXSD3SWAm3A=="}
    assert files == {"files": {"edges": [{"node": node}]}, "outputArtifacts": {"edges": []}}
    assert stored(server, "r").files == {"a/b.txt": b"data"}
    assert raw.graphql("query {")["errors"]
    assert raw.graphql("mutation { inventedField { a } }")["errors"]


def test_compressed_bodies(server: LoopbackServer, raw: Raw) -> None:
    """Bodies compressed with gzip are read."""
    files = {"output.log": {"offset": 0, "content": ["line"]}}
    body = gzip.compress(json.dumps({"files": files}).encode())
    path = f"/files/{ENTITY}/{PROJECT}/r/file_stream"
    raw.send("POST", path, body, **{"Content-Encoding": "gzip"}).read()
    assert stored(server, "r").logs == ["line"]


def test_authentication() -> None:
    """A wrong or missing key answers 401; forbidden operations answer 403."""
    with LoopbackServer(api_key=KEY, forbidden={"viewer"}) as server:
        query = json.dumps({"query": "{ viewer { entity } }"}).encode()
        assert Raw(server, key="").send("POST", "/graphql", query).status == 401
        assert Raw(server, key="wrong").send("POST", "/graphql", query).status == 401
        assert Raw(server).send("POST", "/graphql", query).status == 403
        assert Raw(server).graphql("{ serverInfo { features { name } } }")["data"]
        assert server.env()["WANDB_API_KEY"] == KEY


# Faults


def test_status_fault_is_counted(server: LoopbackServer, raw: Raw) -> None:
    """A fault skips, then hits as often as it was told to, and only its run."""
    raw.upsert("other")
    fault = server.faults.add(Fault(where="file_stream", run="r", status=500, skip=1, times=2))
    assert [raw.stream("r", n, [{"_step": n}]) for n in range(2)] == [200, 500]
    assert raw.stream("other", 0, [{"_step": 0}]) == 200
    assert [raw.stream("r", n, [{"_step": n}]) for n in (1, 1)] == [500, 200]
    assert (fault.hits, fault.spent) == (2, True)
    assert steps(stored(server, "r")) == [0, 1]


def test_retry_after_and_body(server: LoopbackServer, raw: Raw) -> None:
    """A fault can name a Retry-After and a body of its own."""
    server.faults.add(Fault(where="upsertBucket", status=429, retry_after=7, body="slow down"))
    answer = raw.send(
        "POST", "/graphql", json.dumps({"query": "mutation M { upsertBucket }"}).encode()
    )
    assert (answer.status, answer.getheader("Retry-After")) == (429, "7")
    assert answer.read() == b"slow down"


def test_html_page_from_a_proxy(server: LoopbackServer, raw: Raw) -> None:
    """An HTML page with status 200 stands in for the answer, and nothing is stored."""
    server.faults.add(Fault(where="file_stream", html=True))
    assert raw.stream("r", 0, [{"_step": 0}]) == 200
    assert stored(server, "r").rows == []


@pytest.mark.parametrize(("drop", "rows"), [("before", 0), ("after", 1)])
def test_dropped_connection(server: LoopbackServer, raw: Raw, drop: Any, rows: int) -> None:
    """Dropped before: nothing is done; dropped after: done but unanswered."""
    server.faults.add(Fault(where="file_stream", drop=drop))
    with pytest.raises((HTTPException, OSError)):
        raw.stream("r", 0, [{"_step": 0}])
    assert len(stored(server, "r").rows) == rows
    assert server.requests[-1].status is None


def test_delay_and_callback(server: LoopbackServer, raw: Raw) -> None:
    """A callback sees the request before it is applied, and a delay holds it back."""
    seen: list[tuple[Request, int]] = []
    fault = Fault(
        where="file_stream",
        delay_seconds=0.2,
        callback=lambda request: seen.append((request, server.lines_received)),
    )
    server.faults.add(fault)
    began = time.monotonic()
    assert raw.stream("r", 0, [{"_step": 0}]) == 200
    assert time.monotonic() - began >= 0.2
    assert [(request.operation, lines) for request, lines in seen] == [("file_stream", 0)]
    assert server.lines_received == 1


def test_down_and_back(server: LoopbackServer, raw: Raw) -> None:
    """A server that is down refuses connections and comes back on the same port."""
    address = server.url
    server.go_down()
    for client in (raw, Raw(server)):
        with pytest.raises((HTTPException, OSError)):
            client.stream("r", 0, [{"_step": 0}])
    server.come_back()
    assert server.url == address
    assert Raw(server).stream("r", 0, [{"_step": 0}]) == 200


def test_hanging(server: LoopbackServer, raw: Raw) -> None:
    """A hanging server takes requests, never answers them and never carries them out."""
    server.hang()
    with pytest.raises(TimeoutError):
        Raw(server, timeout=0.2).stream("r", 0, [{"_step": 0}])
    server.come_back()
    assert raw.stream("r", 0, []) == 200
    assert stored(server, "r").rows == []


@pytest.mark.parametrize(
    "fault",
    [
        Fault(where="file_stream", status=500, times=2),
        Fault(where="file_stream", drop="before"),
        Fault(where="UpsertBucket", status=503),
    ],
    ids=["errors", "drop", "upsert"],
)
def test_client_survives_passing_faults(
    server: LoopbackServer, ten_rows: Path, fault: Fault
) -> None:
    """The real uploader loses nothing to faults that pass."""
    server.faults.add(fault)
    sync(server, ten_rows)
    assert steps(stored(server, "ten")) == list(range(10))
    assert fault.spent


def test_stored_but_unanswered_is_sent_again(server: LoopbackServer, ten_rows: Path) -> None:
    """Rows that were stored but not acknowledged come again at the same offsets."""
    # The rows come with the first or the second chunk of the stream: hit both once.
    server.faults.add(Fault(where="file_stream", drop="after"))
    server.faults.add(Fault(where="file_stream", drop="after", skip=1))
    sync(server, ten_rows)
    assert steps(stored(server, "ten")) == list(range(10))
    assert stored(server, "ten").overwrites == [(0, 10)]


@pytest.mark.parametrize("where", ["file_stream", "UpsertBucket"])
def test_client_hides_permanent_refusal(server: LoopbackServer, ten_rows: Path, where: str) -> None:
    """A permanent 403 loses every row although `wandb sync` exits with 0."""
    server.faults.add(Fault(where=where, status=403, times=None))
    sync(server, ten_rows)
    assert server.lines_received == 0
    assert [run.state for run in server.runs] == (["running"] if where == "file_stream" else [])


def test_refused_files_leave_rows_alone(server: LoopbackServer, ten_rows: Path) -> None:
    """Storage can be refused on its own: rows arrive, files do not."""
    server.faults.add(Fault(where="storage", status=403, times=None))
    sync(server, ten_rows)
    assert steps(stored(server, "ten")) == list(range(10))
    assert stored(server, "ten").files == {}


def test_client_survives_a_short_outage(server: LoopbackServer, ten_rows: Path) -> None:
    """A server that goes down in the middle and comes back gets every row."""

    def break_down() -> None:
        server.go_down()
        time.sleep(0.5)
        server.come_back()

    def outage(_: Request) -> None:
        threading.Thread(target=break_down).start()
        time.sleep(0.2)

    server.faults.add(Fault(where="file_stream", drop="before", callback=outage))
    sync(server, ten_rows)
    assert steps(stored(server, "ten")) == list(range(10))


# Its own process


def test_command_line() -> None:
    """`python -m verl_logsync.testing` prints its address, tells its state and stops."""
    process = subprocess.Popen(
        [sys.executable, "-m", "verl_logsync.testing", "--no-rewind", "--api-key", KEY],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":")[-1])
        connection = HTTPConnection("127.0.0.1", port, 5)
        connection.request("GET", "/__state__")
        state = json.loads(connection.getresponse().read())
        assert (state["lines_received"], state["runs"]) == (0, {})
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


def test_many_rows_are_cheap(server: LoopbackServer, raw: Raw) -> None:
    """Streaming and counting 5,000 rows of 90 keys takes well under a second of CPU."""
    rows = [
        json.dumps({"_step": step, **{f"actor/metric_{n}": step + n / 7 for n in range(90)}})
        for step in range(5_000)
    ]
    began = time.process_time()
    for offset in range(0, 5_000, 500):
        raw.stream("r", offset, list(rows[offset : offset + 500]))
    keys = stored(server, "r").index.keys
    assert time.process_time() - began < 1.5
    assert keys["actor/metric_3"].counts == {"number": 5_000}
