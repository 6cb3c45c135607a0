"""The `.wandb` transaction log: W&B's file format of offline runs.

The facts, measured on files of wandb 0.16 to 0.31:

* Seven bytes of header: `:W&B`, little-endian u16 0xBEE1, u8 version 0.
* Then LevelDB log framing in blocks of 32,768 bytes counted from the start of the file, so
  that the first block holds seven bytes less. A chunk is u32 checksum, u16 length, u8 type
  (1 full, 2 first, 3 middle, 4 last) and its data; fewer than seven bytes before a block
  border are padding. The checksum is the plain CRC-32 of zlib over type and data, not
  LevelDB's masked CRC-32C.
* A payload is a protobuf `Record` of `wandb.proto.wandb_internal_pb2`.
* Metric values are JSON text. 0.16 and 0.17 put them under `key`, nested dicts as one JSON
  object, and leave `history.step.num` at 0; from 0.18 on an item has a path, `nested_key`,
  whose single element is a metric name with all its slashes.
  The same writers drop the fraction of whole floats: 1.0 is stored as `1`.
* wandb 0.31 can write a typed value beside the JSON text (`x_history_value_encoding` set to
  `json,typed`; not by default, and typed alone is refused by the SDK).
* NaN and infinities are the bare tokens `NaN`, `Infinity` and `-Infinity`.
* A killed writer leaves a file that ends anywhere, often at a block border.
"""

from __future__ import annotations

from verl_logsync.transaction_log.framing import (
    BLOCK_SIZE,
    FILE_HEADER,
    Damage,
    Frame,
    FrameWriter,
    Header,
    HeaderState,
    check_header,
    read_frames,
)
from verl_logsync.transaction_log.reader import (
    UNKNOWN,
    Entry,
    config_updates,
    gpu_memory,
    history_row,
    probe,
    read_records,
    stats_row,
    summary_updates,
    timestamp,
)
from verl_logsync.transaction_log.writer import (
    EncodedKey,
    TransactionLogWriter,
    encode_history,
    encode_key,
)

__all__ = [
    "BLOCK_SIZE",
    "FILE_HEADER",
    "UNKNOWN",
    "Damage",
    "EncodedKey",
    "Entry",
    "Frame",
    "FrameWriter",
    "Header",
    "HeaderState",
    "TransactionLogWriter",
    "check_header",
    "config_updates",
    "encode_history",
    "encode_key",
    "gpu_memory",
    "history_row",
    "probe",
    "read_frames",
    "read_records",
    "stats_row",
    "summary_updates",
    "timestamp",
]
