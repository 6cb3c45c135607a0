"""The files of a training config as files of the run, and as its artifact of type `config`.

What is sent is a copy without secrets, never the file itself.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from verl_logsync.model import ArtifactRef, FileRef
from verl_logsync.transaction_log.records import artifact_record

#: Where a fragment keeps the files that lie beside it.
FILES = "files"


def artifact_name(run_id: str) -> str:
    """The name of a run's config artifact.

    It holds the run id: W&B gives content that it knows under a name no new version, and would
    count it as another run's.
    """
    return f"config-{run_id}"


def config_artifact(files: Sequence[FileRef], run_id: str) -> ArtifactRef | None:
    """An artifact of the files whose content is given; None without any."""
    contents = {f.name: f.content for f in files if f.content is not None}
    if not contents:
        return None
    digests = {
        name: base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        for name, data in sorted(contents.items())
    }
    manifest = hashlib.md5(b"wandb-artifact-manifest-v1\n", usedforsecurity=False)
    for name, digest in digests.items():
        manifest.update(f"{name}:{digest}\n".encode())
    name, digest = artifact_name(run_id), manifest.hexdigest()
    payload = artifact_record(
        kind="config",
        name=name,
        digest=digest,
        client_id=hashlib.sha512(f"{name}:{digest}".encode()).hexdigest(),
        sequence_client_id=hashlib.sha512(name.encode()).hexdigest(),
        entries=[
            (entry, digests[entry], len(contents[entry]), f"{FILES}/{entry}") for entry in digests
        ],
    )
    return ArtifactRef(name, digest, payload)
