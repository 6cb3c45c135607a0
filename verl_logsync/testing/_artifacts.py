"""Artifacts: versions of collections, deduplicated by digest as the real server does."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_logsync.testing._graphql import GraphQLError
from verl_logsync.testing._json import parse_json
from verl_logsync.testing._store import StoredRun, global_id, utc_now

PENDING = "PENDING"
COMMITTED = "COMMITTED"
DELETED = "DELETED"
MANIFEST = "wandb_manifest.json"


@dataclass
class Artifact:
    """One artifact version; `files` maps the names in it to their bytes."""

    id: str
    entity: str
    project: str
    name: str
    type: str
    digest: str
    client_id: str = ""
    run_id: str = ""
    state: str = PENDING
    version_index: int | None = None
    description: str | None = None
    metadata: str | None = None
    aliases: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    manifest_bytes: bytes | None = None
    created_at: str = field(default_factory=utc_now)
    created_times: int = 1

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest that was uploaded, or an empty mapping."""
        parsed: dict[str, Any] = parse_json(self.manifest_bytes or b"{}")
        return parsed

    @property
    def collection(self) -> tuple[str, str, str]:
        """What the artifact is a version of."""
        return (self.entity, self.project, self.name)

    @property
    def size(self) -> int:
        """The bytes of its files."""
        return sum(map(len, self.files.values()))


class ArtifactStore:
    """All artifacts of the server."""

    def __init__(self) -> None:
        self._by_id: dict[str, Artifact] = {}
        self._client_ids: dict[str, str] = {}
        self._blobs: dict[str, bytes] = {}
        self._produced: dict[str, dict[str, None]] = {}
        self._used: dict[str, dict[str, None]] = {}

    def __iter__(self) -> Iterator[Artifact]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, artifact_id: object) -> Artifact:
        """Return an artifact or refuse the request."""
        found = self._by_id.get(str(artifact_id))
        if found is None:
            raise GraphQLError("artifact not found")
        return found

    def find(self, artifact_id: object) -> Artifact | None:
        """Return an artifact by its id or its client id, or None."""
        key = str(artifact_id)
        return self._by_id.get(self._client_ids.get(key, key))

    def server_id(self, client_id: str) -> str | None:
        """Return the id of the artifact that a client made under its own id."""
        return self._client_ids.get(client_id)

    def create(self, values: Mapping[str, Any], entity: str, run: StoredRun | None) -> Artifact:
        """Return the artifact to fill, or the committed one with the same content."""
        name = values.get("artifactCollectionName") or ""
        collection = (entity, str(values.get("projectName")), str(name))
        artifact = self._same_content(collection, str(values.get("digest")))
        if artifact is None:
            artifact = self._new(values, collection)
            artifact.run_id = run.id if run else ""
        else:
            artifact.created_times += 1
        if values.get("clientID"):
            self._client_ids[values["clientID"]] = artifact.id
        if run is not None:
            self._produced.setdefault(run.storage_id, {})[artifact.id] = None
        artifact.tags.extend(tag["tagName"] for tag in values.get("tags") or [])
        aliases = [item["alias"] for item in values.get("aliases") or []]
        self.alias(artifact, aliases)
        return artifact

    def _same_content(self, collection: tuple[str, str, str], digest: str) -> Artifact | None:
        for artifact in self._by_id.values():
            same = artifact.collection == collection and artifact.digest == digest
            if same and artifact.state == COMMITTED:
                return artifact
        return None

    def _new(self, values: Mapping[str, Any], collection: tuple[str, str, str]) -> Artifact:
        entity, project, name = collection
        artifact = Artifact(
            id=global_id("Artifact", str(len(self._by_id) + 1)),
            entity=entity,
            project=project,
            name=name,
            type=str(values.get("artifactTypeName") or ""),
            digest=str(values.get("digest")),
            client_id=str(values.get("clientID") or ""),
            description=values.get("description"),
            metadata=values.get("metadata"),
        )
        self._by_id[artifact.id] = artifact
        return artifact

    def alias(self, artifact: Artifact, aliases: list[str]) -> None:
        """Give aliases to an artifact; an alias leaves its previous holder."""
        for other in self.versions(artifact.collection):
            other.aliases = [alias for alias in other.aliases if alias not in aliases]
        artifact.aliases.extend(aliases)

    def versions(self, collection: tuple[str, str, str]) -> list[Artifact]:
        """Return all versions of a collection that are not deleted, oldest first."""
        return [a for a in self if a.collection == collection and a.state != DELETED]

    def version(self, collection: tuple[str, str, str], alias: str) -> Artifact | None:
        """Return the committed version with an alias or `vN` name."""
        for artifact in self.versions(collection):
            names = {*artifact.aliases, f"v{artifact.version_index}"}
            if artifact.state == COMMITTED and alias in names:
                return artifact
        return None

    def latest(self, collection: tuple[str, str, str]) -> Artifact | None:
        """Return the newest committed version."""
        done = [a for a in self.versions(collection) if a.state == COMMITTED]
        return max(done, key=lambda a: a.version_index or 0, default=None)

    def commit(self, artifact: Artifact) -> None:
        """Make an artifact a version of its collection."""
        if artifact.state == COMMITTED:
            return
        if artifact.manifest_bytes is None:
            raise GraphQLError("cannot commit an artifact whose manifest was not uploaded")
        latest = self.latest(artifact.collection)
        artifact.version_index = 0 if latest is None else (latest.version_index or 0) + 1
        artifact.state = COMMITTED
        self.alias(artifact, [a for a in ["latest"] if a not in artifact.aliases])

    def has_blob(self, artifact: Artifact, name: str, md5: str) -> bool:
        """Link a file that some artifact already brought; return whether there was one."""
        if md5 not in self._blobs:
            return False
        artifact.files[name] = self._blobs[md5]
        return True

    def store(self, artifact: Artifact, name: str, data: bytes) -> None:
        """Keep an uploaded file."""
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        self._blobs[base64.b64encode(digest).decode()] = data
        artifact.files[name] = data

    def use(self, artifact: Artifact, run: StoredRun) -> None:
        """Record that a run reads an artifact."""
        self._used.setdefault(run.storage_id, {})[artifact.id] = None

    def produced_by(self, run: StoredRun) -> list[Artifact]:
        """Return the artifacts that a run made."""
        return [self._by_id[i] for i in self._produced.get(run.storage_id, {})]

    def used_by(self, run: StoredRun) -> list[Artifact]:
        """Return the artifacts that a run reads."""
        return [self._by_id[i] for i in self._used.get(run.storage_id, {})]
