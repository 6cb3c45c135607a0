"""The GraphQL fields of the loopback server: queries."""

from __future__ import annotations

import base64
import hashlib
import mimetypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import quote

from verl_logsync.testing._artifacts import COMMITTED, MANIFEST, Artifact, ArtifactStore
from verl_logsync.testing._filters import matches
from verl_logsync.testing._graphql import Args, GraphQLError, Node
from verl_logsync.testing._json import dump_json, parse_json, strict
from verl_logsync.testing._store import EVENTS, HISTORY, OUTPUT, Store, StoredRun, global_id

_DEFAULT_PAGE = 50
_DEFAULT_SAMPLES = 500
_USERNAME = "loopback-user"


@dataclass(frozen=True)
class Backend:
    """What the resolvers need to know of the server."""

    store: Store
    artifacts: ArtifactStore
    entity: str
    features: frozenset[str]
    rewind: bool
    base_url: Callable[[], str]

    def entity_of(self, name: object) -> str:
        """Return the entity meant, which is the user's own when none is named."""
        return str(name or self.entity)

    def storage_url(self, *parts: str) -> str:
        """Return the address that a stored object is written to and read from."""
        return "/".join([self.base_url(), "storage", *(quote(part, safe="") for part in parts)])


def connection(items: Sequence[Node], args: Args) -> Node:
    """Return one page of a list in the form of a Relay connection."""
    start = int(args.get("after") or 0)
    size = args.get("first")
    stop = len(items) if size is None else start + int(size)
    page = [
        {"node": node, "cursor": str(at)}
        for at, node in enumerate(items[start:stop], start=start + 1)
    ]
    return {
        "totalCount": len(items),
        "edges": page,
        "pageInfo": {
            "__typename": "PageInfo",
            "endCursor": page[-1]["cursor"] if page else None,
            "hasNextPage": stop < len(items),
            "hasPreviousPage": start > 0,
            "startCursor": page[0]["cursor"] if page else None,
        },
    }


def sample(lines: list[str], limit: int) -> list[str]:
    """Thin lines out evenly to a limit, keeping the first and the last."""
    if limit >= len(lines):
        return lines
    if limit <= 1:
        return lines[:limit]
    step = (len(lines) - 1) / (limit - 1)
    return [lines[round(at * step)] for at in range(limit)]


class QueryNodes:
    """Makes the nodes that queries walk over."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._store = backend.store
        self._artifacts = backend.artifacts

    def root(self) -> Node:
        """Return the root of all queries."""
        return {
            "__typename": "Query",
            "viewer": lambda _: self.viewer(),
            "user": lambda _: self.viewer(),
            "serverInfo": lambda _: self._server_info(),
            "entity": lambda a: self.entity(self._backend.entity_of(a.get("name"))),
            "project": self._project,
            "model": self._project,
            "models": lambda a: connection(self._projects(a), a),
            "projects": lambda a: connection(self._projects(a), a),
            "artifact": lambda a: self._optional(self._artifacts.find(a.get("id"))),
            "clientIDMapping": self._client_id_mapping,
            "organization": lambda _: None,
        }

    def viewer(self) -> Node:
        """Return the account that every accepted key belongs to."""
        entity = self._backend.entity
        return {
            "__typename": "User",
            "id": global_id("User", "1"),
            "entity": entity,
            "username": _USERNAME,
            "name": _USERNAME,
            "email": f"{_USERNAME}@example.invalid",
            "admin": False,
            "flags": "{}",
            "teams": connection([{"name": entity}], {}),
            "apiKeys": connection([], {}),
            "organizations": [],
        }

    def entity(self, name: str) -> Node:
        """Return an entity; every name is one."""
        return {
            "__typename": "Entity",
            "id": global_id("Entity", name),
            "name": name,
            "isTeam": False,
            "project": lambda a: self._project({**a, "entityName": name}),
            "projects": lambda a: connection(self._projects({"entityName": name}), a),
            "defaultAccess": "USER_WRITE",
            "readOnly": False,
        }

    def _server_info(self) -> Node:
        features = [{"name": name, "isEnabled": True} for name in sorted(self._backend.features)]
        return {
            "features": features,
            "cliVersionInfo": {"max_cli_version": "99.0.0", "min_cli_version": "0.1.0"},
        }

    def _client_id_mapping(self, args: Args) -> Node | None:
        server_id = self._artifacts.server_id(str(args.get("clientID")))
        return None if server_id is None else {"serverID": server_id}

    def _projects(self, args: Args) -> list[Node]:
        entity = self._backend.entity_of(args.get("entityName"))
        return [self.project(*key) for key in self._store.projects if key[0] == entity]

    def _project(self, args: Args) -> Node | None:
        entity = self._backend.entity_of(args.get("entityName") or args.get("entity"))
        name = str(args.get("name"))
        known = (entity, name) in self._store.projects
        return self.project(entity, name) if known else None

    def project(self, entity: str, name: str) -> Node:
        """Return a project."""
        key = (entity, name)
        runs = self._store.projects.get(key, {})
        return {
            "__typename": "Project",
            "id": global_id("Project", "v1", name, entity),
            "internalId": str(1 + list(self._store.projects).index(key)),
            "name": name,
            "entityName": entity,
            "entity": lambda _: self.entity(entity),
            "readOnly": False,
            "isBenchmark": False,
            "access": "USER_WRITE",
            "description": None,
            "user": lambda _: self.viewer(),
            "createdAt": next((run.created_at for run in runs.values()), None),
            "run": lambda a: self._run_named(runs, a),
            "bucket": lambda a: self._run_named(runs, a),
            "runs": lambda a: self._runs(runs.values(), a),
            "runCount": lambda a: len(_filtered(runs.values(), a)),
            "artifact": lambda a: self._optional(self._artifact_named(entity, name, a)),
            "artifactCollectionMembership": lambda a: self._membership_named(entity, name, a),
            "artifactCollection": lambda a: self.collection((entity, name, str(a.get("name")))),
            "artifactSequence": lambda a: self.collection((entity, name, str(a.get("name")))),
            "artifactType": lambda a: self._artifact_type(entity, name, str(a.get("name"))),
            "artifactTypes": lambda a: connection(self._artifact_types(entity, name), a),
        }

    def _run_named(self, runs: dict[str, StoredRun], args: Args) -> Node | None:
        run = runs.get(str(args.get("name")))
        return None if run is None else self.run(run)

    def _runs(self, runs: Iterable[StoredRun], args: Args) -> Node:
        found = _filtered(runs, args)
        order = str(args.get("order") or "")
        field = order.lstrip("+-")
        if field in {"heartbeat_at", "heartbeatAt", "updated_at"}:
            found.sort(key=lambda run: run.heartbeat_at)
        if order.startswith("-"):
            found.reverse()
        page = {"first": _DEFAULT_PAGE, **{k: v for k, v in args.items() if v is not None}}
        return connection([self.run(run) for run in found], page)

    def run(self, run: StoredRun) -> Node:
        """Return a run; what is costly to know is worked out only when asked for."""
        return {
            **self._run_basics(run),
            "config": lambda _: run.config_json(),
            "summaryMetrics": lambda _: run.summary_json,
            "systemMetrics": lambda _: run.line_files[EVENTS].last or "{}",
            "wandbConfig": lambda a: run.internal_config(a.get("keys")),
            "historyLineCount": len(run.line_files[HISTORY]),
            "eventsLineCount": len(run.line_files[EVENTS]),
            "logLineCount": len(run.line_files[OUTPUT]),
            "historyTail": lambda _: _tail(run, HISTORY),
            "eventsTail": lambda _: _tail(run, EVENTS),
            "historyKeys": lambda _: strict(run.index.as_json()) if run.lines else None,
            "history": lambda a: _history(run, a),
            "events": lambda a: sample(run.line_files[EVENTS].lines, _samples(a)),
            "sampledHistory": lambda a: [_sampled(run, parse_json(s)) for s in _listed(a, "specs")],
            "parquetHistory": lambda _: _parquet_history(run),
            "logLines": lambda a: _log_lines(run, a),
            "files": lambda a: self._files(run, a),
            "file": lambda a: self._file_named(run, str(a.get("name"))),
            "fileCount": len(run.files),
            "outputArtifacts": lambda a: self._artifact_page(self._artifacts.produced_by(run), a),
            "inputArtifacts": lambda a: self._artifact_page(self._artifacts.used_by(run), a),
        }

    def _run_basics(self, run: StoredRun) -> dict[str, object]:
        return {
            **run.fields,
            "__typename": "Run",
            "id": run.storage_id,
            "name": run.id,
            "displayName": run.name,
            "state": run.state,
            "tags": run.tags,
            "notes": run.notes,
            "group": run.group,
            "groupName": run.group,
            "jobType": run.job_type,
            "sweepName": run.fields.get("sweep"),
            "createdAt": run.created_at,
            "heartbeatAt": run.heartbeat_at,
            "updatedAt": run.heartbeat_at,
            "readOnly": False,
            "stopped": run.stopped,
            "project": lambda _: self.project(run.entity, run.project),
            "projectId": str(1 + list(self._store.projects).index((run.entity, run.project))),
            "entity": lambda _: self.entity(run.entity),
            "user": lambda _: self.viewer(),
        }

    def _files(self, run: StoredRun, args: Args) -> Node:
        names = args.get("names") or list(run.files)
        pattern = str(args.get("pattern") or "%").replace("%", "*").replace("_", "?")
        chosen = [n for n in names if n in run.files and fnmatchcase(n, pattern)]
        return connection([self._file(run, name) for name in chosen], args)

    def _file_named(self, run: StoredRun, name: str) -> Node | None:
        return self._file(run, name) if name in run.files else None

    def _file(self, run: StoredRun, name: str) -> Node:
        url = self._backend.storage_url("run", run.entity, run.project, run.id, name)
        return {
            **_file_facts(name, run.files[name], url),
            "id": global_id("File", run.id, name),
            "updatedAt": run.file_times.get(name),
        }

    def _optional(self, artifact: Artifact | None) -> Node | None:
        return None if artifact is None else self.artifact(artifact)

    def _artifact_page(self, artifacts: list[Artifact], args: Args) -> Node:
        return connection([self.artifact(artifact) for artifact in artifacts], args)

    def artifact(self, artifact: Artifact) -> Node:
        """Return an artifact version."""
        maker = self._store.find(artifact.entity, artifact.project, artifact.run_id)
        return {
            "__typename": "Artifact",
            "id": artifact.id,
            "digest": artifact.digest,
            "digestAlgorithm": "MANIFEST_MD5",
            "state": artifact.state,
            "versionIndex": artifact.version_index,
            "description": artifact.description,
            "metadata": artifact.metadata,
            "size": artifact.size,
            "fileCount": len(artifact.files),
            "createdAt": artifact.created_at,
            "updatedAt": artifact.created_at,
            "ttlDurationSeconds": -1,
            "ttlIsInherited": True,
            "tags": [{"__typename": "Tag", "id": t, "name": t} for t in artifact.tags],
            "artifactType": {"name": artifact.type},
            "artifactSequence": lambda _: self.collection(artifact.collection),
            "aliases": lambda _: self._aliases(artifact),
            "currentManifest": lambda _: self._manifest(artifact),
            "files": lambda a: self._artifact_files(artifact, a),
            "filesByManifestEntries": lambda a: self._artifact_files(artifact, a),
            "createdBy": lambda _: None if maker is None else self.run(maker),
            "artifactMemberships": lambda a: connection([self.membership(artifact)], a),
        }

    def _aliases(self, artifact: Artifact) -> list[Node]:
        return [
            {
                "__typename": "ArtifactAlias",
                "id": global_id("ArtifactAlias", artifact.id, alias),
                "alias": alias,
                "artifactCollection": lambda _: self.collection(artifact.collection),
                "artifactCollectionName": artifact.name,
            }
            for alias in artifact.aliases
        ]

    def _manifest(self, artifact: Artifact) -> Node | None:
        if artifact.manifest_bytes is None:
            return None
        return self.manifest(artifact)

    def manifest(self, artifact: Artifact) -> Node:
        """Return the manifest of an artifact, with the address to write it to."""
        url = self._backend.storage_url("artifact", artifact.run_id or "-", artifact.id, "manifest")
        file = {
            "id": global_id("File", artifact.id, MANIFEST),
            "directUrl": url,
            "uploadUrl": url,
            "uploadHeaders": [],
        }
        return {"id": global_id("ArtifactManifest", artifact.id), "file": file}

    def artifact_file_url(self, artifact: Artifact, name: str) -> str:
        """Return the address of one file of an artifact."""
        place = ("artifact", artifact.run_id or "-", artifact.id)
        return self._backend.storage_url(*place, "file", name)

    def _artifact_files(self, artifact: Artifact, args: Args) -> Node:
        names = args.get("names") or list(artifact.files)
        entries = args.get("entries")
        if entries:
            names = [entry.get("name") or entry.get("path") for entry in entries]
        nodes = [
            {
                **_file_facts(name, artifact.files[name], self.artifact_file_url(artifact, name)),
                "id": global_id("File", artifact.id, name),
                "updatedAt": artifact.created_at,
            }
            for name in names
            if name in artifact.files
        ]
        return connection(nodes, args)

    def collection(self, key: tuple[str, str, str]) -> Node | None:
        """Return a collection of artifact versions, or None when there is none."""
        entity, project, name = key
        versions = self._artifacts.versions(key)
        if not versions:
            return None
        return {
            "__typename": "ArtifactSequence",
            "id": global_id("ArtifactSequence", *key),
            "name": name,
            "project": lambda _: self.project(entity, project),
            "defaultArtifactType": {"name": versions[0].type},
            "latestArtifact": lambda _: self._optional(self._artifacts.latest(key)),
            "artifacts": lambda a: self._artifact_page(self._committed(key), a),
            "artifactMembership": lambda a: self._membership(key, str(a.get("aliasName"))),
            "tags": connection([], {}),
            "createdAt": versions[0].created_at,
            "updatedAt": versions[-1].created_at,
            "state": "READY",
        }

    def _committed(self, key: tuple[str, str, str]) -> list[Artifact]:
        return [a for a in self._artifacts.versions(key) if a.state == COMMITTED]

    def membership(self, artifact: Artifact) -> Node:
        """Return an artifact's place in its collection."""
        return {
            "__typename": "ArtifactCollectionMembership",
            "id": global_id("ArtifactCollectionMembership", artifact.id),
            "versionIndex": artifact.version_index,
            "createdAt": artifact.created_at,
            "aliases": lambda _: self._aliases(artifact),
            "artifactCollection": lambda _: self.collection(artifact.collection),
            "artifact": lambda _: self.artifact(artifact),
            "files": lambda a: self._artifact_files(artifact, a),
        }

    def _membership(self, key: tuple[str, str, str], alias: str) -> Node | None:
        artifact = self._artifacts.version(key, alias)
        return None if artifact is None else self.membership(artifact)

    def _membership_named(self, entity: str, project: str, args: Args) -> Node | None:
        artifact = self._artifact_named(entity, project, args)
        return None if artifact is None else self.membership(artifact)

    def _artifact_named(self, entity: str, project: str, args: Args) -> Artifact | None:
        name, _, alias = str(args.get("name")).partition(":")
        return self._artifacts.version((entity, project, name), alias or "latest")

    def _artifact_types(self, entity: str, project: str) -> list[Node]:
        here = [a for a in self._artifacts if (a.entity, a.project) == (entity, project)]
        names = dict.fromkeys(artifact.type for artifact in here)
        return [self._artifact_type(entity, project, name) for name in names]

    def _artifact_type(self, entity: str, project: str, name: str) -> Node:
        here = [a for a in self._artifacts if (a.entity, a.project) == (entity, project)]
        keys = dict.fromkeys(a.collection for a in here if a.type == name)
        nodes = [node for key in keys if (node := self.collection(key)) is not None]
        return {
            "__typename": "ArtifactType",
            "id": global_id("ArtifactType", entity, project, name),
            "name": name,
            "artifactCollections": lambda a: connection(nodes, a),
            "artifactSequences": lambda a: connection(nodes, a),
        }


def type_node(name: object, fields: Iterable[str]) -> Node:
    """Return what introspection says about a type."""
    return {
        "__typename": "__Type",
        "name": name,
        "kind": "OBJECT",
        "fields": [{"name": field, "args": []} for field in sorted(fields)],
        "inputFields": [],
    }


def _filtered(runs: Iterable[StoredRun], args: Args) -> list[StoredRun]:
    condition = parse_json(args.get("filters") or "{}") or {}
    try:
        return [run for run in runs if matches(run, condition)]
    except (KeyError, AttributeError, TypeError) as error:
        raise GraphQLError(f"invalid filters: {error!r}") from error


def _listed(args: Args, name: str) -> list[Any]:
    value = args.get(name) or []
    return value if isinstance(value, list) else [value]


def _samples(args: Args) -> int:
    samples = args.get("samples")
    return _DEFAULT_SAMPLES if samples is None else int(samples)


def _tail(run: StoredRun, name: str) -> str:
    last = run.line_files[name].last
    return dump_json([] if last is None else [last])


def _history(run: StoredRun, args: Args) -> list[str]:
    return sample(run.scan(args.get("minStep"), args.get("maxStep")), _samples(args))


def _sampled(run: StoredRun, spec: dict[str, Any]) -> list[object]:
    keys = spec.get("keys") or []
    highest = spec.get("maxStep")
    # Unlike `history`, whose maxStep is exclusive, a spec names the last step it wants.
    lines = run.scan(spec.get("minStep"), None if highest is None else highest + 1)
    rows = [row for row in map(parse_json, lines) if all(key in row for key in keys)]
    if keys:
        rows = [{key: row[key] for key in keys} for row in rows]
    chosen = sample([dump_json(row) for row in rows], _samples(spec))
    return [strict(parse_json(line)) for line in chosen]


def _parquet_history(run: StoredRun) -> Node:
    steps = [step for step in run.index.steps if step is not None]
    # Nothing is exported; clients only look for the step where live data begins.
    return {"parquetUrls": [], "liveData": [{"_step": float(min(steps))}] if steps else []}


def _log_lines(run: StoredRun, args: Args) -> Node:
    lines = list(enumerate(run.logs))
    if args.get("last") is not None:
        lines = lines[-int(args["last"]) :]
    nodes: list[Node] = [
        {"number": at, "line": line, "timestamp": None, "level": None, "label": None}
        for at, line in lines
    ]
    return connection(nodes, args)


def _file_facts(name: str, data: bytes, url: str) -> dict[str, object]:
    md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
    return {
        "__typename": "File",
        "name": name,
        "displayName": name,
        "sizeBytes": str(len(data)),
        "md5": md5,
        "digest": md5,
        "mimetype": mimetypes.guess_type(name)[0] or "application/octet-stream",
        "url": url,
        "directUrl": url,
        "storagePath": name,
    }
