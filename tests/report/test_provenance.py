from __future__ import annotations

import datetime
import json
import platform

import torch

from tilewright import __version__
from tilewright.report.provenance import provenance


def test_it_says_what_ran_where_and_when() -> None:
    record = provenance(["tilewright", "bench", "/home/someone/m.gguf", "-r", "3"], threads=2)
    assert json.loads(json.dumps(record)) == record
    assert record["command"] == "tilewright bench m.gguf -r 3"
    assert record["tilewright"] == __version__
    assert record["python"] == platform.python_version()
    # Builds for GPUs call themselves "2.13.0+cu130" and are installed as "2.13.0".
    assert record["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert record["threads"] == 2
    assert record["device"]
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(record["date"])
    assert abs(age.total_seconds()) < 60
    assert len(record["load_average"]) == 3


def test_its_command_can_be_run_again() -> None:
    words = ["tilewright", "compare", "--tile", "dot(unroll=2, threads=0)", "--cmd", "sh a/b.sh 1"]
    told = provenance(words)["command"]
    assert told == "tilewright compare --tile 'dot(unroll=2, threads=0)' --cmd 'sh b.sh 1'"
    assert provenance("python x/y.py --m 1")["command"] == "python y.py --m 1"
