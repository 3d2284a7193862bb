"""The conductor's side of `test_two_hosts.py`: keeps ranks on two nodes and takes some steps.

python -m tests.integration.head_program RUN_DIR ADDRESS PORT INTERFACE
"""

import asyncio
import json
import sys
from pathlib import Path

from fastapi import FastAPI
from uvicorn import Config, Server

from services.trainer.launch_routes import router
from tests.integration.ranks_world import Run, make_job

NUM_STEPS = 4
STALL_S = 6.0


async def main(run_dir: Path, address: str, port: int, interface: str) -> None:
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_IB_HCA")
    rendezvous = {"host": address, "port": port + 1, "timeout_s": 90.0}
    cluster = {"nodes": 2, "actor_nodes": 2, "gpus_per_node": 2, "rendezvous": rendezvous}
    env = dict.fromkeys(names, interface)
    run = Run(run_dir, make_job(stall_s=STALL_S, cluster=cluster, env=env))
    app = FastAPI()
    app.include_router(router)
    app.state.board = run.board
    server = Server(Config(app, host=address, port=port, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    await run.keeper.restore()
    result = {}
    for step in range(1, NUM_STEPS + 1):
        result = await run.step(step)
        if step == 1:
            await run.keeper.save(1)
    await run.close()
    (run_dir / "result.json").write_text(json.dumps(result))
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]))
