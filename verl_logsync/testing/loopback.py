"""A W&B server on this machine, for tests and benchmarks.

It speaks enough of W&B's GraphQL, file-stream and storage protocols for the real,
unpatched `wandb` clients: online runs, `wandb sync`, resume, rewind, artifacts and the
public API. It keeps *true line offsets* and *true states*, so that an uploader that
loses, doubles or shifts rows is found out, and it misbehaves on request:

    with LoopbackServer() as server:
        server.faults.add(Fault(where="file_stream", status=500, times=3))
        subprocess.run(["wandb", "sync", folder], env={**os.environ, **server.env()})
        assert [row["_step"] for row in server.run("loopback", "grpo", "abc").rows] == [0, 1, 2]

Its answers follow the clients' source and what the clients were seen to rely on; nothing
here was compared with W&B's own cloud.
"""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType
from typing import TYPE_CHECKING

from verl_logsync.testing._application import Application
from verl_logsync.testing._artifacts import Artifact, ArtifactStore
from verl_logsync.testing._faults import Drop, Fault, Faults, Request
from verl_logsync.testing._listener import Listener
from verl_logsync.testing._schema import Backend
from verl_logsync.testing._store import Store, StoredRun

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "DEFAULT_FEATURES",
    "Artifact",
    "Drop",
    "Fault",
    "Faults",
    "LoopbackServer",
    "Request",
    "StoredRun",
]

DEFAULT_FEATURES = frozenset(
    {
        "ARTIFACT_COLLECTION_MEMBERSHIP_FILES",
        "ARTIFACT_DIGEST_ALGORITHM",
        "ARTIFACT_TAGS",
        "CLIENT_IDS",
        "LARGE_FILENAMES",
        "MARK_RUN_FILES_UPLOADED",
        "PROJECT_ARTIFACT_COLLECTION_MEMBERSHIP",
        "TOTAL_COUNT_IN_FILE_CONNECTION",
        "USE_ARTIFACT_WITH_ENTITY_AND_PROJECT_INFORMATION",
    }
)
"""Server features told to clients.

`STRUCTURED_CONSOLE_LOGS` turns console lines into JSON objects, `FILESTREAM_GZIP` lets
clients compress what they stream.
"""

# Clients refuse keys shorter than 40 characters before they ask the server.
_ANY_KEY = "0" * 40


class LoopbackServer:
    """A W&B server that remembers everything and can be told to misbehave.

    Args:
        port: the port of 127.0.0.1 to listen on; 0 takes a free one.
        entity: the entity that clients get when they name none.
        api_key: the only key accepted; None accepts every key that is not empty.
        rewind: whether the `rewindRun` mutation exists.
        forbidden: operations, root fields or kinds of request (`"file_stream"`,
            `"storage"`) that are answered with 403.
        features: the features that clients are told of.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        entity: str = "loopback",
        api_key: str | None = None,
        rewind: bool = True,
        forbidden: Collection[str] = (),
        features: Collection[str] = DEFAULT_FEATURES,
    ) -> None:
        self._api_key = api_key
        self._store = Store()
        self._artifacts = ArtifactStore()
        backend = Backend(
            store=self._store,
            artifacts=self._artifacts,
            entity=entity,
            features=frozenset(features),
            rewind=rewind,
            base_url=lambda: self.url,
        )
        self._application = Application(backend, api_key, forbidden)
        self._listener = Listener(self._application, port)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Accept connections."""
        self._listener.start()

    def close(self) -> None:
        """Stop for good; what was recorded can still be read."""
        self._application.close()
        self._listener.close()

    @property
    def url(self) -> str:
        """The address, to be used as `WANDB_BASE_URL`."""
        return f"http://127.0.0.1:{self._listener.port}"

    def env(self) -> dict[str, str]:
        """Return the environment variables that point a client to this server."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": self._api_key or _ANY_KEY}

    @property
    def faults(self) -> Faults:
        """The faults in force."""
        return self._application.faults

    def go_down(self) -> None:
        """Cut all connections and refuse new ones until `come_back`."""
        self._listener.stop()

    def hang(self) -> None:
        """Accept requests and never answer them until `come_back`."""
        self._application.hang()

    def come_back(self) -> None:
        """Answer again, on the same port.

        Requests left hanging are not carried out; their connections are closed.
        """
        self._application.flow()
        self._listener.start()

    def delete_run(self, run_id: str) -> None:
        """Delete the runs with an id, as a user would; the id stays taken for ever."""
        for run in self.runs:
            if run.id == run_id:
                self._store.delete(run)

    def run(self, entity: str, project: str, run_id: str) -> StoredRun:
        """Return a run; raises KeyError for one that does not exist."""
        run = self._store.find(entity, project, run_id)
        if run is None:
            known = sorted(f"{r.entity}/{r.project}/{r.id}" for r in self.runs)
            raise KeyError(f"no run {entity}/{project}/{run_id}; there are {known}")
        return run

    @property
    def runs(self) -> list[StoredRun]:
        """All runs."""
        return self._store.runs

    @property
    def requests(self) -> list[Request]:
        """All requests so far, in order of arrival."""
        return list(self._application.requests)

    @property
    def artifacts(self) -> list[Artifact]:
        """All artifacts, committed or not."""
        return list(self._artifacts)

    @property
    def lines_received(self) -> int:
        """History lines accepted so far, those that were written over included."""
        return self._store.lines_received

    def state(self) -> dict[str, object]:
        """Return counts of everything; also served as JSON at `/__state__`."""
        return self._application.state()
