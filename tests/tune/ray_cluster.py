"""A Ray cluster on this machine, two workers on CPUs of their own, for as long as stdin is open.

Prints its address and the process of each worker's node. A node that dies is noticed within two
seconds, where Ray by itself takes ten or more.
"""

from __future__ import annotations

import json
import os
import sys

from ray.cluster_utils import Cluster

_MEMORY = 80 << 20
_NOTICE = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}


def main() -> None:
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": _NOTICE})
    try:
        cpus = os.sched_getaffinity(0)
        nodes = []
        for cpu in (min(cpus), max(cpus)):
            os.sched_setaffinity(0, {cpu})  # what a node is started with, its workers have
            nodes.append(cluster.add_node(num_cpus=1, object_store_memory=_MEMORY, wait=False))
        os.sched_setaffinity(0, cpus)
        cluster.wait_for_nodes()
        raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
        print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
