"""The GraphQL fields of the loopback server: mutations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_logsync.testing._artifacts import DELETED
from verl_logsync.testing._graphql import Args, GraphQLError, Node
from verl_logsync.testing._schema import Backend, QueryNodes
from verl_logsync.testing._store import StoredRun


class Mutations:
    """Changes what the server holds."""

    def __init__(self, backend: Backend, nodes: QueryNodes) -> None:
        self._backend = backend
        self._store = backend.store
        self._artifacts = backend.artifacts
        self._nodes = nodes

    def root(self) -> Node:
        """Return the root of all mutations; the field names are what is supported."""
        fields: dict[str, Callable[[dict[str, Any]], object]] = {
            "upsertBucket": self._upsert_run,
            "deleteRun": self._delete_run,
            "stopRun": self._stop_run,
            "updateRunState": self._update_run_state,
            "upsertModel": self._upsert_project,
            "createRunFiles": self._create_run_files,
            "markRunFilesUploaded": lambda _: {"success": True},
            "notifyScriptableRunAlert": lambda _: {"success": True},
            "createArtifact": self._create_artifact,
            "createArtifactManifest": self._artifact_manifest,
            "updateArtifactManifest": self._artifact_manifest,
            "createArtifactFiles": self._create_artifact_files,
            "commitArtifact": self._commit_artifact,
            "updateArtifact": self._update_artifact,
            "deleteArtifact": self._delete_artifact,
            "useArtifact": self._use_artifact,
        }
        if self._backend.rewind:
            fields["rewindRun"] = self._rewind_run
        return {name: _with_input(resolve) for name, resolve in fields.items()}

    def _upsert_run(self, values: dict[str, Any]) -> Node:
        run_id = values.get("name")
        if run_id:
            entity = self._backend.entity_of(values.get("entityName"))
            project = str(values.get("modelName") or "uncategorized")
            run, inserted = self._store.upsert(entity, project, str(run_id))
            run.reopen(str(values.get("state") or "running"))
        else:
            # The public API edits a run by its storage id; that is not a client
            # starting to write, so the state stays.
            run, inserted = self._by_storage_id(values), False
        run.update(values)
        return {"bucket": self._nodes.run(run), "inserted": inserted}

    def _by_storage_id(self, values: dict[str, Any]) -> StoredRun:
        run = self._store.find_by_storage_id(str(values.get("id")))
        if run is None:
            raise GraphQLError("run not found")
        return run

    def _delete_run(self, values: dict[str, Any]) -> Node:
        self._store.delete(self._by_storage_id(values))
        return {"clientMutationId": None}

    def _stop_run(self, values: dict[str, Any]) -> Node:
        self._by_storage_id(values).stopped = True
        return {"success": True}

    def _update_run_state(self, values: dict[str, Any]) -> Node:
        self._by_storage_id(values).state = str(values.get("state"))
        return {"success": True}

    def _upsert_project(self, values: dict[str, Any]) -> Node:
        entity = self._backend.entity_of(values.get("entityName"))
        name = str(values.get("name"))
        inserted = (entity, name) not in self._store.projects
        self._store.make_project(entity, name)
        node = self._nodes.project(entity, name)
        return {"project": node, "model": node, "inserted": inserted}

    def _rewind_run(self, values: dict[str, Any]) -> Node:
        if values.get("metricName") != "_step":
            raise GraphQLError("rewind supports the metric _step only")
        run = self._named_run(values)
        run.rewind(float(values["metricValue"]))
        return {"rewoundRun": self._nodes.run(run)}

    def _named_run(self, values: dict[str, Any]) -> StoredRun:
        entity = self._backend.entity_of(values.get("entityName"))
        project, run_id = str(values.get("projectName")), str(values.get("runName"))
        run = self._store.find(entity, project, run_id)
        if run is None:
            raise GraphQLError(f"run {entity}/{project}/{run_id} not found")
        return run

    def _create_run_files(self, values: dict[str, Any]) -> Node:
        run = self._named_run(values)
        place = ("run", run.entity, run.project, run.id)
        files = [
            {"name": name, "uploadUrl": self._backend.storage_url(*place, name)}
            for name in values.get("files") or []
        ]
        return {"runID": run.storage_id, "uploadHeaders": [], "files": files}

    def _create_artifact(self, values: dict[str, Any]) -> Node:
        run = self._named_run(values) if values.get("runName") else None
        entity = self._backend.entity_of(values.get("entityName"))
        artifact = self._artifacts.create(values, entity, run)
        return {"artifact": self._nodes.artifact(artifact)}

    def _artifact_manifest(self, values: dict[str, Any]) -> Node:
        artifact_id = values.get("artifactID")
        if artifact_id is None:
            raise GraphQLError("changing a manifest without its artifact is not supported")
        artifact = self._artifacts.get(artifact_id)
        return {"artifactManifest": self._nodes.manifest(artifact)}

    def _create_artifact_files(self, values: dict[str, Any]) -> Node:
        edges = [{"node": self._artifact_file(spec)} for spec in values.get("artifactFiles") or []]
        return {"files": {"edges": edges}}

    def _artifact_file(self, spec: dict[str, Any]) -> Node:
        artifact = self._artifacts.get(spec.get("artifactID"))
        name, md5 = str(spec.get("name")), str(spec.get("md5"))
        held = self._artifacts.has_blob(artifact, name, md5)
        return {
            "name": name,
            "displayName": name,
            "storagePath": name,
            "uploadUrl": None if held else self._nodes.artifact_file_url(artifact, name),
            "uploadHeaders": [f"Content-MD5:{md5}"],
            "artifact": {"id": artifact.id},
        }

    def _commit_artifact(self, values: dict[str, Any]) -> Node:
        artifact = self._artifacts.get(values.get("artifactID"))
        self._artifacts.commit(artifact)
        return {"artifact": self._nodes.artifact(artifact)}

    def _update_artifact(self, values: dict[str, Any]) -> Node:
        artifact = self._artifacts.get(values.get("artifactID"))
        if values.get("metadata") is not None:
            artifact.metadata = values["metadata"]
        if values.get("description") is not None:
            artifact.description = values["description"]
        if values.get("aliases"):
            self._artifacts.alias(artifact, [item["alias"] for item in values["aliases"]])
        return {"artifact": self._nodes.artifact(artifact)}

    def _delete_artifact(self, values: dict[str, Any]) -> Node:
        artifact = self._artifacts.get(values.get("artifactID"))
        artifact.state = DELETED
        return {"artifact": self._nodes.artifact(artifact)}

    def _use_artifact(self, values: dict[str, Any]) -> Node:
        artifact = self._artifacts.get(values.get("artifactID"))
        self._artifacts.use(artifact, self._named_run(values))
        return {"artifact": self._nodes.artifact(artifact)}


def _with_input(resolve: Callable[[dict[str, Any]], object]) -> Callable[[Args], object]:
    return lambda args: resolve(dict(args.get("input") or {}))
