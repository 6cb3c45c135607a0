"""What the loopback server answers, apart from the sockets."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import orjson

from verl_logsync.testing._faults import Fault, Faults, Request
from verl_logsync.testing._graphql import Execution, GraphQLError
from verl_logsync.testing._json import parse_json
from verl_logsync.testing._mutations import Mutations
from verl_logsync.testing._schema import Backend, QueryNodes, type_node
from verl_logsync.testing._store import EVENTS, HISTORY, OUTPUT, DeletedRunError, StoredRun, utc_now

_RUN_VARIABLES = ("run", "runName", "name", "runId", "id")
_GZIP = 16 + zlib.MAX_WBITS
_PROXY_PAGE = b"<!DOCTYPE html><html><body><h1>The proxy says hello</h1></body></html>"


@dataclass(frozen=True)
class Reply:
    """An HTTP answer."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, value: object, status: int = 200) -> Reply:
        """Answer a value as JSON."""
        try:
            return cls(status, orjson.dumps(value))
        except TypeError:
            # Integers beyond 64 bits and lone surrogates, which clients may have logged.
            return cls(status, json.dumps(value).encode())

    @classmethod
    def error(cls, message: str, status: int) -> Reply:
        """Answer an error in the form that GraphQL clients print."""
        return cls.of({"error": message, "errors": [{"message": message}]}, status)


@dataclass(frozen=True)
class Incoming:
    """A request that has been read from its socket."""

    method: str
    parts: tuple[str, ...]
    headers: Mapping[str, str]
    body: bytes
    request: Request
    execution: Execution | None = None
    syntax_error: str | None = None


class Application:
    """Routes requests to the store; applies authentication and faults on the way."""

    def __init__(self, backend: Backend, api_key: str | None, forbidden: Collection[str]) -> None:
        self.backend = backend
        self.faults = Faults()
        self.requests: list[Request] = []
        self._api_key = api_key
        self._forbidden = frozenset(forbidden)
        self._nodes = QueryNodes(backend)
        self._mutations = Mutations(backend, self._nodes)
        self._flowing = threading.Event()
        self._flowing.set()
        self._closing = threading.Event()

    def hang(self) -> None:
        """Leave requests unanswered from now on."""
        self._flowing.clear()

    def flow(self) -> None:
        """Answer again; the requests left hanging lose their connections."""
        self._flowing.set()

    def close(self) -> None:
        """Let nothing wait any longer."""
        self._closing.set()
        self._flowing.set()

    def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | None:
        """Answer a request; None means to close the connection instead."""
        incoming = self._read(method, path, headers, body)
        self.requests.append(incoming.request)
        if not self._flowing.is_set():
            self._flowing.wait()
            return None
        reply = self._with_faults(incoming)
        incoming.request.status = None if reply is None else reply.status
        return reply

    def _read(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Incoming:
        bare = path.partition("?")[0]
        parts = tuple(unquote(part) for part in bare.strip("/").split("/"))
        request = Request(method, path, bytes=len(body))
        if "gzip" in headers.get("Content-Encoding", ""):
            body = zlib.decompress(body, _GZIP)
        execution, syntax_error = None, None
        if parts == ("graphql",):
            execution, syntax_error = self._read_graphql(request, body)
        elif parts[-1] == "file_stream" or parts[0] == "storage":
            request.kind = request.operation = parts[0] if parts[0] == "storage" else "file_stream"
            request.run_ids = frozenset(parts)
        return Incoming(method, parts, headers, body, request, execution, syntax_error)

    def _read_graphql(self, request: Request, body: bytes) -> tuple[Execution | None, str | None]:
        request.kind = "graphql"
        payload = parse_json(body or b"{}")
        variables = payload.get("variables") or {}
        try:
            execution = Execution.prepare(
                payload.get("query") or "", variables, payload.get("operationName")
            )
            request.root_fields = tuple(execution.root_fields)
        except GraphQLError as error:
            return None, str(error)
        request.operation = execution.operation.name
        inputs = variables.get("input")
        named = {**variables, **inputs} if isinstance(inputs, dict) else variables
        request.run_ids = frozenset(str(named[key]) for key in _RUN_VARIABLES if key in named)
        return execution, None

    def _with_faults(self, incoming: Incoming) -> Reply | None:
        fault = self.faults.pick(incoming.request)
        if fault is None:
            return self._authorised(incoming)
        if fault.callback is not None:
            fault.callback(incoming.request)
        if fault.delay_seconds:
            self._closing.wait(fault.delay_seconds)
        if fault.drop == "before":
            return None
        if fault.drop == "after":
            self._authorised(incoming)
            return None
        return _faulty(fault) if fault.answers else self._authorised(incoming)

    def _authorised(self, incoming: Incoming) -> Reply:
        request = incoming.request
        # Storage addresses are presigned on the real server and carry no key.
        if request.kind in {"graphql", "file_stream"}:
            key = _api_key(incoming.headers.get("Authorization", ""))
            if not key or self._api_key not in {None, key}:
                return Reply.error("invalid API key", 401)
        if self._forbidden.intersection({request.kind, request.operation, *request.root_fields}):
            return Reply.error("permission denied", 403)
        return self._route(incoming)

    def _route(self, incoming: Incoming) -> Reply:
        match incoming.parts:
            case ("graphql",):
                return self._graphql(incoming)
            case ("__state__",):
                return Reply.of(self.state())
            case ("files", entity, project, run_id, *name):
                return self._files(entity, project, run_id, name, incoming)
            case ("storage", "run", entity, project, run_id, name):
                return self._run_storage(entity, project, run_id, name, incoming)
            case ("storage", "artifact", _, artifact_id, *name):
                return self._artifact_storage(artifact_id, name, incoming)
        return Reply.error("no such page", 404)

    def _graphql(self, incoming: Incoming) -> Reply:
        if incoming.execution is None:
            return Reply.error(incoming.syntax_error or "no document", 400)
        mutating = incoming.execution.operation.kind == "mutation"
        try:
            with self.backend.store.lock:
                root = self._mutations.root() if mutating else self._query_root()
                data = incoming.execution.answer(root)
                return Reply.of({"data": data})
        except GraphQLError as error:
            return Reply.of({"data": None, "errors": [{"message": str(error)}]})
        except DeletedRunError as error:
            return Reply.error(f"run {error} was previously created and deleted", 409)

    def _query_root(self) -> Mapping[str, object]:
        query = dict(self._nodes.root())
        query["__type"] = lambda args: self._type(str(args.get("name")), query)
        return query

    def _type(self, name: str, query: Mapping[str, object]) -> Mapping[str, object] | None:
        if name == "Mutation":
            return type_node(name, self._mutations.root())
        return type_node(name, query) if name == "Query" else None

    def _files(
        self, entity: str, project: str, run_id: str, name: list[str], incoming: Incoming
    ) -> Reply:
        run = self.backend.store.find(entity, project, run_id)
        if run is None:
            return Reply.error("run not found", 404)
        if name != ["file_stream"]:
            return _content(run.files.get("/".join(name)))
        body: Mapping[str, Any] = parse_json(incoming.body or b"{}")
        self.backend.store.stream(run, body)
        return Reply.of({"exitcode": None, "limits": {}, "stopped": run.stopped})

    def _run_storage(
        self, entity: str, project: str, run_id: str, name: str, incoming: Incoming
    ) -> Reply:
        run = self.backend.store.find(entity, project, run_id)
        if run is None:
            return Reply.error("run not found", 404)
        if incoming.method != "PUT":
            return _content(run.files.get(name))
        if not _undamaged(incoming):
            return Reply.error("the content does not have the announced MD5", 400)
        with self.backend.store.lock:
            run.files[name] = incoming.body
            run.file_times[name] = utc_now()
        return Reply(200)

    def _artifact_storage(self, artifact_id: str, name: list[str], incoming: Incoming) -> Reply:
        artifact = self.backend.artifacts.find(artifact_id)
        if artifact is None:
            return Reply.error("artifact not found", 404)
        file = None if name == ["manifest"] else name[-1]
        if incoming.method != "PUT":
            return _content(artifact.manifest_bytes if file is None else artifact.files.get(file))
        if not _undamaged(incoming):
            return Reply.error("the content does not have the announced MD5", 400)
        with self.backend.store.lock:
            if file is None:
                artifact.manifest_bytes = incoming.body
            else:
                self.backend.artifacts.store(artifact, file, incoming.body)
        return Reply(200)

    def state(self) -> dict[str, object]:
        """Return counts of everything, for another process to ask."""
        store = self.backend.store
        return {
            "lines_received": store.lines_received,
            "requests": Counter(r.operation or r.path for r in list(self.requests)),
            "bytes_received": sum(r.bytes for r in list(self.requests)),
            "cpu_seconds": time.process_time(),
            "artifacts": len(self.backend.artifacts),
            "runs": {f"{r.entity}/{r.project}/{r.id}": _counts(r) for r in store.runs},
        }


def _counts(run: StoredRun) -> dict[str, object]:
    return {
        "state": run.state,
        "exit_code": run.exit_code,
        "name": run.name,
        "history": len(run.line_files[HISTORY]),
        "events": len(run.line_files[EVENTS]),
        "logs": len(run.line_files[OUTPUT]),
        "files": len(run.files),
        "upserts": run.upserts,
        "gaps": run.gaps,
        "overwrites": run.overwrites,
        "rewinds": run.rewinds,
    }


def _api_key(authorization: str) -> str:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() != "basic":
        return value.strip()
    try:
        return base64.b64decode(value).decode().partition(":")[2]
    except ValueError:
        return ""


def _faulty(fault: Fault) -> Reply:
    headers = {} if fault.retry_after is None else {"Retry-After": f"{fault.retry_after:g}"}
    if fault.html:
        page = _PROXY_PAGE if fault.body is None else fault.body
        body = page.encode() if isinstance(page, str) else page
        return Reply(fault.status or 200, body, "text/html; charset=utf-8", headers)
    status = fault.status or 200
    if fault.body is None:
        body = Reply.error(f"injected fault {status}", status).body
    else:
        body = fault.body.encode() if isinstance(fault.body, str) else fault.body
    return Reply(status, body, headers=headers)


def _undamaged(incoming: Incoming) -> bool:
    announced = incoming.headers.get("Content-MD5")
    if not announced:
        return True
    digest = hashlib.md5(incoming.body, usedforsecurity=False).digest()
    return announced == base64.b64encode(digest).decode()


def _content(data: bytes | None) -> Reply:
    if data is None:
        return Reply.error("no such file", 404)
    return Reply(200, data, "application/octet-stream")
