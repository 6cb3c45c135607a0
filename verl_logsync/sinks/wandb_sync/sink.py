"""The sink that sends to a W&B server."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from verl_logsync.columns import STEP, from_json
from verl_logsync.errors import (
    AuthError,
    LogsyncError,
    RefusedByServer,
    RunDeleted,
    Unreachable,
    WriteError,
)
from verl_logsync.interfaces import Parcel, Sent
from verl_logsync.model import MARKER_KEY, Action, Binding, RemoteState, Target, UploadPlan
from verl_logsync.secrets_mask import mask_text
from verl_logsync.sinks.wandb_sync.child import (
    ChildResult,
    Uploader,
    environment,
    kind_environment,
)
from verl_logsync.sinks.wandb_sync.credentials import Server
from verl_logsync.sinks.wandb_sync.diary import denied
from verl_logsync.sinks.wandb_sync.graphql import Deadline, GraphQL
from verl_logsync.sinks.wandb_sync.official_scan import scan_history
from verl_logsync.transaction_log.fragment import read_marker, write_fragment

#: A child holds four open files a fragment; a thousand fragments meet the usual limit.
CHILD_FRAGMENTS: Final = 100
_PAGE: Final = 100
_SHORTEST_WAIT: Final = 20.0
_HISTORY_PAGE: Final = 1000

_RUNS: Final = """
query VerlLogsyncRuns($entity: String!, $project: String!, $filters: JSONString, $after: String) {
  project(name: $project, entityName: $entity) {
    runs(filters: $filters, first: 100, after: $after) {
      edges { node {
        name state config summaryMetrics historyLineCount eventsLineCount logLineCount
        historyKeys historyTail tags
      } }
      pageInfo { endCursor hasNextPage }
    }
  }
}
"""
_FILES: Final = """
query VerlLogsyncFiles($entity: String!, $project: String!, $run: String!, $after: String) {
  project(name: $project, entityName: $entity) {
    run(name: $run) {
      files(first: 100, after: $after) {
        edges { node { name sizeBytes } } pageInfo { endCursor hasNextPage }
      }
    }
  }
}
"""
_ARTIFACTS: Final = """
query VerlLogsyncArtifacts($entity: String!, $project: String!, $run: String!, $after: String) {
  project(name: $project, entityName: $entity) {
    run(name: $run) {
      outputArtifacts(first: 50, after: $after) {
        edges { node { digest state artifactSequence { name } } }
        pageInfo { endCursor hasNextPage }
      }
    }
  }
}
"""
_HISTORY: Final = """
query VerlLogsyncHistory(
  $entity: String!, $project: String!, $run: String!, $from: Int64!, $to: Int64!, $size: Int!
) {
  project(name: $project, entityName: $entity) {
    run(name: $run) { history(minStep: $from, maxStep: $to, samples: $size) }
  }
}
"""
_VIEWER: Final = "query VerlLogsyncViewer { viewer { entity username } }"
_MUTATIONS: Final = '{ __type(name: "Mutation") { fields { name } } }'

#: (append to what is there, end the run): what only the child's environment can say.
Kind = tuple[bool, bool]

#: An HTTP status in the uploader's words; other numbers are not taken for one.
_STATUS: Final = re.compile(r"(?:error|status|http|code)[\s:(=]*([45]\d\d)\b", re.IGNORECASE)
#: A traceback, of which only the last line says what happened, and the lines before that one.
_RAISED: Final = re.compile(r"^Traceback \(.*\n(?:[ \t].*\n)*(\S.*)", re.MULTILINE)
_TRACE: Final = re.compile(r"\s|Traceback \(")
_MESSAGE: Final = re.compile(r"^wandb: (?:(ERROR|WARNING) )?\[([^\]]+)\] (.*)$")


class WandbSink:
    """Sends plans as fragments with `wandb sync`, and reads runs back.

    Args:
        server: where, and with which key.
        work: a folder for fragments on the way; they are removed after every send.
        jobs: runs that one uploader sends at a time.
        seconds: all the time that the network may take.
        held: descriptors that the uploader keeps open (the lock).
    """

    def __init__(
        self, server: Server, work: Path, *, jobs: int, seconds: float, held: Sequence[int] = ()
    ) -> None:
        self._server = server
        self._work = work
        self._jobs = jobs
        self._held = held
        self._deadline = Deadline(seconds)
        self._graphql = GraphQL(server, self._deadline)
        self._default_entity: str | None = None
        self._mutations: frozenset[str] | None = None
        self._cannot_rewind: set[Target] = set()
        self._uploaders: dict[Kind, Uploader] = {}
        self._started = 0
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._prepared = False
        self._closed = False

    # -- reading back ---------------------------------------------------------------------

    def look(self, targets: Sequence[Target]) -> Mapping[Target, RemoteState]:
        """What the server holds of those targets that exist there."""
        found: dict[Target, RemoteState] = {}
        for (entity, project), group in _by_project(targets).items():
            for start in range(0, len(group), _PAGE):
                page = {t.run_id: t for t in group[start : start + _PAGE]}
                for node in self._runs(entity, project, {"name": {"$in": sorted(page)}}):
                    if node.get("name") in page:
                        found[page[node["name"]]] = _remote_state(node)
        return found

    def with_parts(self, target: Target, state: RemoteState) -> RemoteState:
        """The same state with the run's files and artifacts, which cost a question of their own."""
        files = {
            node["name"]: int(node.get("sizeBytes") or 0)
            for node in self._all(_FILES, target, "files")
        }
        committed = {
            ((node.get("artifactSequence") or {}).get("name", ""), node.get("digest", ""))
            for node in self._all(_ARTIFACTS, target, "outputArtifacts")
            if node.get("state") == "COMMITTED"
        }
        return replace(state, files=files, artifacts=frozenset(committed))

    def _all(self, query: str, target: Target, what: str) -> Iterator[Mapping[str, Any]]:
        """Every node of one of a run's connections, page by page."""
        after = None
        while True:
            connection = self._run(query, target, {"after": after}).get(what) or {}
            yield from _nodes(connection)
            page = connection.get("pageInfo") or {}
            after = page.get("endCursor")
            if not page.get("hasNextPage") or not after:
                return

    def find(self, project: Target, keys: Sequence[str]) -> Sequence[Binding]:
        """Runs of a project that carry a marker with one of these names."""
        filters = {f"config.{MARKER_KEY}.value.names_key": {"$in": sorted(set(keys))}}
        found = []
        for node in self._runs(project.entity, project.project, filters):
            state = _remote_state(node)
            if state.marker is not None:
                target = Target(project.entity, project.project, node["name"])
                marker = state.marker
                last = state.last_step if state.last_step is not None else -1
                found.append(
                    Binding(target, marker.names_key, marker.heads, marker.fingerprint, last)
                )
        return found

    def pins(self, target: Target) -> Mapping[str, float]:
        """Nothing: `look` reads the marker that holds them."""
        return {}

    def probe(self) -> None:
        """Ask who we are: the one question that every server answers to every good key."""
        if not isinstance(self._graphql.ask(_VIEWER, {}).get("viewer"), dict):
            raise self._unknown_key()

    def rows(self, target: Target) -> Iterator[Mapping[str, Any]]:
        """Every stored row, unsampled: by our query, else by W&B's own scan."""
        state = self.look([target]).get(target)
        if state is None or not state.lines:
            return
        rows = list(self._pages(target, state))
        if len(rows) < state.lines:
            path = f"{self._entity(target.entity)}/{target.project}/{target.run_id}"
            rows = list(scan_history(self._server, path)) or rows
        yield from rows

    def _pages(self, target: Target, state: RemoteState) -> Iterator[Mapping[str, Any]]:
        """Rows page by page; windows over steps without rows grow, so gaps cost little."""
        start, width, left = 0, _HISTORY_PAGE, state.lines
        last = state.last_step if state.last_step is not None else -1
        while start <= last and left > 0:
            page = {"from": start, "to": start + width, "size": max(_HISTORY_PAGE, left)}
            lines = self._run(_HISTORY, target, page).get("history") or ()
            rows = [from_json(line) if isinstance(line, str) else line for line in lines]
            rows = [row for row in rows if start <= row.get(STEP, -1) < start + width]
            yield from rows
            left -= len(rows)
            start, width = start + width, width if rows else 16 * width

    def can_rewind(self, target: Target) -> bool:
        """Whether the server's schema offers it and did not refuse it for this run."""
        if target in self._cannot_rewind:
            return False
        if self._mutations is None:
            answer = self._graphql.ask(_MUTATIONS, {}).get("__type") or {}
            self._mutations = frozenset(f["name"] for f in answer.get("fields") or ())
        # A server that does not describe itself may still be able to.
        return not self._mutations or "rewindRun" in self._mutations

    def refuses_rewind(self, target: Target) -> None:
        """Remember that a rewind of this run was tried and did not happen."""
        self._cannot_rewind.add(target)

    def url(self, target: Target) -> str:
        """Where a person can look at the run."""
        app = self._server.shown_url.replace("://api.wandb.ai", "://wandb.ai")
        entity = self._entity(target.entity, target.project)
        return f"{app}/{entity}/{target.project}/runs/{target.run_id}"

    def _runs(
        self, entity: str, project: str, filters: Mapping[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        after = None
        while True:
            answer = self._ask(
                _RUNS, entity, project, {"filters": json.dumps(filters), "after": after}
            )
            runs = (answer.get("project") or {}).get("runs") or {}
            yield from _nodes(runs)
            page = runs.get("pageInfo") or {}
            after = page.get("endCursor")
            if not page.get("hasNextPage") or not after:
                return

    def _run(self, query: str, target: Target, more: Mapping[str, Any]) -> Mapping[str, Any]:
        more = {"run": target.run_id, **more}
        answer = self._ask(query, target.entity, target.project, more)
        run = (answer.get("project") or {}).get("run")
        return run if isinstance(run, dict) else {}

    def _ask(
        self, query: str, entity: str, project: str, more: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        variables = {"entity": self._entity(entity, project), "project": project, **more}
        return self._graphql.ask(query, variables, _place(variables["entity"], project))

    def _entity(self, entity: str, project: str = "") -> str:
        if entity:
            return entity
        if self._default_entity is None:
            viewer = self._graphql.ask(_VIEWER, {}, _place("", project)).get("viewer")
            if not isinstance(viewer, dict):
                raise self._unknown_key()
            self._default_entity = viewer.get("entity") or viewer.get("username") or ""
        return self._default_entity

    def _unknown_key(self) -> AuthError:
        return AuthError(
            f"{self._server.shown_url} does not know the key from {self._server.key_from}",
            hint="Set WANDB_API_KEY, or log in once with: wandb login",
        )

    # -- sending --------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Start the uploader, which takes a second, while runs are still being read."""
        self._uploader((True, True))

    def pack(self, plan: UploadPlan) -> Parcel:
        """Write the plan's fragment."""
        entity = self._entity(plan.target.entity, plan.target.project)
        parent = self._outbox() / f"fragment-{next(self._numbers)}"
        return Parcel(plan, write_fragment(plan, parent, entity=entity, use="send"))

    def send(self, parcels: Sequence[Parcel]) -> Mapping[Target, Sent]:
        """Send each fragment once, whatever becomes of it."""
        sent: dict[Target, Sent] = {}
        for kind, group in _by_kind(parcels).items():
            for start in range(0, len(group), CHILD_FRAGMENTS):
                part = group[start : start + CHILD_FRAGMENTS]
                sent.update(self._run_child(kind, part))
                for parcel in part:
                    shutil.rmtree(parcel.folder.parent, ignore_errors=True)
        return sent

    def close(self) -> None:
        """End the uploaders for good and leave no fragment behind."""
        self._closed = True
        for uploader in list(self._uploaders.values()):
            uploader.close()
        if self._prepared:
            shutil.rmtree(self._work, ignore_errors=True)

    def _outbox(self) -> Path:
        """The folder for fragments; what a killed upload left in it is never sent again."""
        try:
            with self._lock:  # the reading and the sending thread both come here
                if not self._prepared:
                    shutil.rmtree(self._work, ignore_errors=True)
                    self._prepared = True
                self._work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(
                f"cannot be written: {error.strerror}",
                place=str(self._work),
                hint="Give a writable folder with free space: --state-dir DIR",
            ) from error
        return self._work

    def _uploader(self, kind: Kind) -> Uploader:
        """The child for a kind of fragments; a new one when it ended or did its share."""
        known = self._uploaders.get(kind)
        if known is not None and known.alive and known.fragments < CHILD_FRAGMENTS:
            return known
        if known is not None:
            known.close()
        if self._closed:
            raise Unreachable("the upload was interrupted", hint="The next run continues")
        self._started += 1
        folder = self._outbox() / f"uploader-{self._started}"
        env = environment(self._server, folder, self._deadline.left)
        self._uploaders[kind] = Uploader(env, folder, jobs=self._jobs, held=self._held)
        return self._uploaders[kind]

    def _run_child(self, kind: Kind, group: Sequence[Parcel]) -> dict[Target, Sent]:
        resume, finish = kind
        uploader = self._uploader(kind)
        result = uploader.sync(
            [parcel.folder for parcel in group],
            kind_environment(resume=resume, finish=finish),
            # One run that hangs may cost its batch, not all the time of the others.
            min(self._deadline.left, max(_SHORTEST_WAIT, self._deadline.left / 3)),
        )
        return {p.plan.target: self._sent(p, result, uploader.work) for p in group}

    def _sent(self, parcel: Parcel, result: ChildResult, work: Path) -> Sent:
        target = parcel.plan.target
        messages = _messages(result.output, target.run_id)
        if result.timed_out:
            return Sent(self._deadline.exceeded(self._server.shown_url), messages)
        error = _meaning(target, messages)
        if error is None and messages:
            rewinds = parcel.plan.action is Action.REWIND
            status = denied(work, parcel.folder, rows_only=rewinds)
            error = self._denied(target, f" ({status})") if status else None
        elif isinstance(error, AuthError):
            error = self._denied(target)
        return Sent(error, messages)

    def _denied(self, target: Target, status: str = "") -> AuthError:
        where = _place(self._entity(target.entity, target.project), target.project)
        return AuthError(
            f"the key from {self._server.key_from} may not write to {where}{status}",
            hint="Check --entity and --project, or the key with: wandb login --verify",
        )


def _place(entity: str, project: str) -> str:
    """What a user calls it; the key has an entity of its own."""
    return "/".join(filter(None, (entity or "its default entity", project)))


def _by_project(targets: Sequence[Target]) -> dict[tuple[str, str], list[Target]]:
    groups: dict[tuple[str, str], list[Target]] = {}
    for target in targets:
        groups.setdefault((target.entity, target.project), []).append(target)
    return groups


def _by_kind(parcels: Sequence[Parcel]) -> dict[Kind, list[Parcel]]:
    """Fragments by what the child's environment must say."""
    groups: dict[Kind, list[Parcel]] = {}
    for parcel in parcels:
        plan = parcel.plan
        kind = plan.action is not Action.REWIND, plan.state != "running"
        groups.setdefault(kind, []).append(parcel)
    return groups


def _messages(output: str, run_id: str) -> tuple[str, ...]:
    """The warnings and errors that the uploader printed about a run, or about no run at all."""
    messages = []
    for line in output.splitlines():
        found = _MESSAGE.match(line)
        if found and found[1] and found[2].split("/")[-1] == run_id:
            messages.append(mask_text(found[3]))
        elif not found and line.startswith(("wandb: ERROR", "Error:")):
            messages.append(mask_text(line.removeprefix("wandb: ERROR ")))
    messages.extend(mask_text(words) for words in _RAISED.findall(output))
    if "wandb: " not in output:  # it never came so far as to speak for itself
        last_words = [line for line in output.splitlines() if not _TRACE.match(line)]
        messages.extend(mask_text(line) for line in last_words[-3:])
    return tuple(dict.fromkeys(messages))


def _meaning(target: Target, messages: Sequence[str]) -> LogsyncError | None:
    """What the uploader's words mean for the user; None when they do not settle it."""
    text = " ".join(messages)
    statuses = set(_STATUS.findall(text))
    if "409" in statuses or "previously created and deleted" in text:
        return RunDeleted(
            f"run {target.run_id} was deleted on the server, which never takes its id again"
        )
    if statuses & {"401", "403"} or "permission denied" in text.lower():
        return AuthError("the key may not write there")
    if re.search(r"connection refused|no such host", text, re.IGNORECASE):
        return Unreachable(
            "the server went away while rows were sent",
            hint="Nothing is lost: run the same command again",
        )
    if statuses & {"400", "413", "422"}:
        return RefusedByServer(
            f"the server refuses this run or its rows: {messages[0][:200]}",
            hint="Check its names (--project, --run) and the size of its rows",
        )
    return None


# -- the server's words --------------------------------------------------------------------


def _nodes(connection: Any) -> Iterator[Mapping[str, Any]]:
    for edge in (connection or {}).get("edges") or ():
        node = edge.get("node")
        if isinstance(node, dict):
            yield node


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = from_json(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def _remote_state(node: Mapping[str, Any]) -> RemoteState:
    keys = _object(node.get("historyKeys"))
    counts = {
        name: sum(int(t.get("count", 0)) for t in entry.get("typeCounts") or ())
        for name, entry in (keys.get("keys") or {}).items()
    }
    return RemoteState(
        state=str(node.get("state", "")),
        lines=int(node.get("historyLineCount") or 0),
        events=int(node.get("eventsLineCount") or 0),
        logs=int(node.get("logLineCount") or 0),
        last_step=_last_step(node.get("historyTail"), keys),
        summary=_object(node.get("summaryMetrics")),
        key_counts=counts,
        marker=read_marker(_object(_object(node.get("config")).get(MARKER_KEY)).get("value")),
        tags=tuple(map(str, node.get("tags") or ())),
    )


def _last_step(tail: Any, keys: Mapping[str, Any]) -> int | None:
    try:
        lines = from_json(tail) if isinstance(tail, str) else tail or []
        rows = [from_json(line) if isinstance(line, str) else line for line in lines]
        if rows and isinstance(rows[-1].get(STEP), int | float):
            return int(rows[-1][STEP])
    except (ValueError, AttributeError, TypeError):
        pass  # the list of keys says it too
    last = keys.get("lastStep")
    return int(last) if isinstance(last, int | float) and last >= 0 else None
