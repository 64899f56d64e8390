"""The same scan, file by file, on a Ray cluster.

Workers read the files themselves and hand back rows, so they need to see the metadata (a shared disk or S3) and nothing
else; the parts are written here and merged as those of one machine are, hence the same result.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.data.retrieve.metadata import MetadataFile, S3Options, connect
from holdfast.data.retrieve.search import Progress, SearchQuery, part_path, scan_files, write_part
from holdfast.errors import HoldfastError, UserError


def import_ray() -> Any:
    """Ray, or a sentence that names the extra."""
    try:
        import ray
    except ImportError as error:
        raise UserError("searching on a cluster needs Ray", do="install holdfast[ray]") from error
    return ray


def scan_to_bytes(
    index: int, file: MetadataFile, query: SearchQuery, s3: S3Options | None, memory: str, spill: str
) -> bytes:
    """Scan one file with one thread; the rows come back as a small Arrow file."""
    sink = io.BytesIO()
    with connect(memory, 1, Path(spill), s3, [file]) as connection:
        batches = list(scan_files(connection, [(index, file)], query))
    if batches:
        pq.write_table(pa.Table.from_batches(batches), sink, compression="zstd")
    return sink.getvalue()


def scan_on_cluster(
    address: str,
    files: list[MetadataFile],
    query: SearchQuery,
    parts: Path,
    s3: S3Options | None,
    memory: str,
    progress: Progress | None,
) -> None:
    """Scan the files that have no part yet on the cluster at ``address`` (``local`` starts one here)."""
    ray = import_ray()
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(
                address=None if address == "local" else address,
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(
                f"no Ray cluster at {address}",
                found=str(error).splitlines()[0][:200],
                do="check --cluster, or use local",
            ) from error
    total = sum(file.rows for file in files)
    remote = ray.remote(num_cpus=1)(scan_to_bytes)
    # A worker's spill goes to its own temporary folder: `parts` may not exist there.
    waiting = {
        remote.remote(index, file, query, s3, memory, "/tmp"): index
        for index, file in enumerate(files)
        if not part_path(parts, index).exists()
    }
    done = total - sum(files[index].rows for index in waiting.values())
    try:
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1)
            index = waiting.pop(ready[0])
            try:
                content: bytes = ray.get(ready[0])
            except ray.exceptions.RayTaskError as error:
                cause = error.cause if isinstance(error.cause, HoldfastError) else None
                raise cause or error from error
            batches = pq.read_table(io.BytesIO(content)).to_batches() if content else []
            write_part(part_path(parts, index), iter(batches))
            done += files[index].rows
            if progress is not None:
                progress(done, total)
    finally:
        if started:
            ray.shutdown()
