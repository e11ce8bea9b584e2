"""A key-value store that only this host can reach."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def loopback_store(timeout: timedelta = timedelta(seconds=60)) -> dist.TCPStore:
    """A TCPStore server in this process that listens on 127.0.0.1, `store.port`. By itself TCPStore listens on every
    interface, whatever the host name it is given, and serves whoever connects."""
    door = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = door.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=door.detach()
    )
