"""A request under a real limit on the address space: it dies without the guard and ends with it, and its tokens are
those of a run without a limit in which the same steps are taken at the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # two calls are compiled

# Everything is compiled once; each run is then a fork with a limit of its own. What grows is real: generate() keeps
# the logits of every token. Blocks of this size are mapped one by one, so that what is freed is free again.
CHILD = """
import json, os, resource, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import sitsopt

torch.manual_seed(0)
torch.set_num_threads(1)
layers, width, NEW = map(int, sys.argv[1:])
config = LlamaConfig(
    vocab_size=8192, hidden_size=256, intermediate_size=width, num_hidden_layers=layers, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)
model = LlamaForCausalLM(config).eval()
recipe = {"weights": [{"match": "model.layers.*", "scheme": "int8"}], "hooks": {"guard": {}}, "profitability": "always"}
sitsopt.optimize(model, recipe, lowering="eager")
guarded = model._compiled_call_impl
ids = torch.arange(8 * 4).view(8, 4) * 37 % 8192

def answer(new=NEW):
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=new, do_sample=False, output_logits=True,
                              return_dict_in_generate=True).sequences[:, 4:].tolist()

answer()                          # compiled, for caches of this size
guarded.calls = 0
assert not guarded.events, guarded.events
NEED = NEW * 8 * 8192 * 4         # bytes of the logits that are kept

def run(limited, guard, forced):
    if not guard:
        model._compiled_call_impl = guarded.call
    if forced:
        guarded.forced = {int(call): names for call, names in forced.items()}
    if limited:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + NEED // 2 + (10 << 20), resource.RLIM_INFINITY))
    tokens = answer()
    return {"tokens": tokens, "taken": guarded.taken(), "events": guarded.json(), "calls": guarded.calls}

def forked(*how):
    receive, send = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            found = run(*how)
            os.write(send, json.dumps(found).encode())
            status = 0
        except BaseException as error:
            try:
                said = {"error": f"{type(error).__name__}: {error}"[:300], "events": guarded.json()}
                os.write(send, json.dumps(said).encode())
            except BaseException:
                pass
        finally:
            os._exit(status)
    os.close(send)
    data = b""
    while chunk := os.read(receive, 65536):
        data += chunk
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return {"status": status, **(json.loads(data) if data else {})}

without = forked(True, False, None)
with_guard = forked(True, True, None)
forced = forked(False, True, with_guard.get("taken"))
exact = forked(False, True, None)
print(json.dumps({"without": without, "with": with_guard, "forced": forced, "exact": exact}))
"""


# Of many narrow layers the cache is what weighs; of few wide ones already the prompt's rows are too much.
SHAPES = {"deep": (8, 2048, 90), "wide": (2, 8192, 60)}


@pytest.fixture(scope="module", params=["deep", pytest.param("wide", marks=pytest.mark.sample)])
def runs(request: pytest.FixtureRequest) -> dict[str, dict[str, object]]:
    layers, width, new = SHAPES[request.param]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "MALLOC_ARENA_MAX": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(layers), str(width), str(new)],
        capture_output=True, text=True, env=env, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, object]] = json.loads(done.stdout.strip().splitlines()[-1])
    found["asked"] = {"new": new}
    return found


def test_without_the_guard_it_dies(runs: dict[str, dict[str, object]]) -> None:
    assert runs["without"]["status"] == 1
    assert "memory" in str(runs["without"]["error"]).lower()


def test_with_the_guard_it_ends(runs: dict[str, dict[str, object]]) -> None:
    one = runs["with"]
    assert one["status"] == 0, one
    assert [len(row) for row in one["tokens"]] == [runs["asked"]["new"]] * 8  # type: ignore[attr-defined]
    assert one["taken"], "the limit was never near"
    assert all(event["cause"] for event in one["events"])  # type: ignore[attr-defined]


def test_its_tokens_are_those_of_the_same_steps_without_a_limit(
    runs: dict[str, dict[str, object]],
) -> None:
    assert runs["forced"]["status"] == 0
    assert runs["forced"]["taken"] == runs["with"]["taken"]
    assert runs["forced"]["calls"] == runs["with"]["calls"]
    assert runs["forced"]["tokens"] == runs["with"]["tokens"]


def test_nothing_is_taken_where_there_is_room(runs: dict[str, dict[str, object]]) -> None:
    assert runs["exact"]["status"] == 0 and not runs["exact"]["events"]
