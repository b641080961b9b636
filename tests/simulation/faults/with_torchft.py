"""A training of two replicas with torchft, one of which is started again after a fault, for test_torchft.py.

python with_torchft.py
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupNCCL
from torchft.coordination import LighthouseServer

STEPS = 40
TIMEOUT_S, RESTART_S, STEP_S = 5, 5, 0.25


def say(text: str) -> None:
    """Print a line by one write: with PYTHONUNBUFFERED, print() writes its end separately, and others write between."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


def train(replica: int) -> None:
    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupNCCL(timeout=timedelta(seconds=TIMEOUT_S)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        rank=0,  # of the one rank of this replica
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"replica_{replica}",
        hostname="localhost",
    )
    torch.manual_seed(replica)  # other weights, until replica 1 takes those of replica 0
    model = DistributedDataParallel(manager, nn.Linear(8, 1).cuda())
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=0.01))
    step, done, event = 0, 0, ""
    # The last step is one of both replicas, however long a restart takes.
    while step < STEPS or manager.num_participants() < 2:
        last_step, last_event = step, event
        torch.manual_seed(1000 * step + replica)
        x = torch.randn(16, 8).cuda()
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        step = manager.current_step()
        done += step > last_step
        if step == last_step:
            event = "failed"
        elif not manager.is_participating():
            event = "took the weights of the other replica"
        else:
            event = f"{manager.num_participants()} of 2 replicas"
        if event != last_event:
            say(f"replica {replica}: step {max(step, last_step + 1)}: {event}")
        time.sleep(STEP_S)
    weights = torch.cat([each.detach().flatten() for each in model.parameters()]).cpu().numpy()
    digest = hashlib.sha256(weights.tobytes()).hexdigest()[:8]
    say(f"replica {replica}: step {step}: {done} done by this process, weights {digest}")
    manager.shutdown()


def supervise(replica: int, lighthouse: str) -> int:
    """Start a replica, and once more if it fails. Return its last status."""
    own = {"RANK": str(replica), "CUDA_VISIBLE_DEVICES": str(replica), "TORCHFT_LIGHTHOUSE": lighthouse}
    status = 1
    for attempt in range(2):
        time.sleep(RESTART_S * attempt)  # the other replica does steps alone
        status = subprocess.run([sys.executable, __file__], env={**os.environ, **own}, check=False).returncode
        say(f"replica {replica}: status {status}")
        if status == 0:
            break
    return status


def main() -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"
    with ThreadPoolExecutor() as pool:
        statuses = list(pool.map(supervise, range(2), [address] * 2))
    lighthouse.shutdown()
    sys.exit(any(statuses))


if "RANK" in os.environ:
    train(int(os.environ["RANK"]))
else:
    main()
