"""Does a drafter that was trained and exported here decode in z-lab's own `dflash` as it does here? Not collected by name:

pip install --no-deps --target ZLAB dflash
python tests/zlab_oracle.py ZLAB RUN EXPORT

RUN is a training run, EXPORT what `python -m dflash export RUN EXPORT` wrote. z-lab's package has the import name of ours, so
it runs in a process of its own, where only ZLAB is on the path. Held-out prompts are decoded greedily in float32 by both. The
tokens must be equal, and the number of rounds within 2 %: near ties of the drafter's logits may round differently, and z-lab's
blocks shrink before the limit of tokens, ours do not. Exit code 0 if they are, else 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPTS, NEW_TOKENS = 8, 96
MOST_ROUNDS_APART = 0.02


def theirs(request: Path) -> None:
    """Decode with z-lab's code; runs in the process of its own."""
    import torch  # noqa: PLC0415 - neither process needs the other's imports
    from dflash.model import (  # type: ignore[import-not-found]  # noqa: PLC0415 - z-lab's, not ours
        DFlashDraftModel,
        dflash_generate,
    )
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - see above

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_arguments: None  # its clock asks for a GPU
    asked = json.loads(request.read_text())
    drafter = DFlashDraftModel.from_pretrained(asked["export"], dtype=torch.float32).eval()
    target = AutoModelForCausalLM.from_pretrained(asked["target"], dtype=torch.float32).eval()
    answers = []
    for ids in asked["prompts"]:
        with torch.inference_mode():
            done = dflash_generate(drafter, target, torch.tensor([ids]), NEW_TOKENS, asked["eos"], return_stats=True)
        answers.append({"tokens": done.output_ids[0].tolist(), "committed": [int(n) for n in done.acceptance_lengths]})
    request.write_text(json.dumps(answers))


def ours(run: Path, export: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What z-lab's code is asked, and our answers."""
    from dflash.config import EvaluateConfig  # noqa: PLC0415 - see `theirs`
    from dflash.decoding import evaluate  # noqa: PLC0415 - see `theirs`
    from dflash.decoding.chain import speculate  # noqa: PLC0415 - see `theirs`

    config = EvaluateConfig(run=run, max_prompts=PROMPTS, max_new_tokens=NEW_TOKENS, dtype="float32")
    loaded = evaluate._load(config)
    eos = list(loaded.meta.eos_token_ids)
    prompts = [ids for _, ids in loaded.prompts]
    answers = []
    for ids in prompts:
        done = speculate(loaded.model, loaded.ends, loaded.drafter, ids, max_new_tokens=NEW_TOKENS, eos_ids=eos)
        answers.append({"tokens": [*ids, *done.tokens], "committed": [stats.committed for stats in done.rounds]})
    target = str(Path(loaded.run.target.path).absolute())
    return {"export": str(export.absolute()), "target": target, "prompts": prompts, "eos": eos}, answers


def main() -> int:
    """Ask both and compare."""
    if len(sys.argv) == 3 and sys.argv[1] == "--theirs":
        theirs(Path(sys.argv[2]))
        return 0
    if len(sys.argv) != 4:
        sys.stderr.write("usage: python tests/zlab_oracle.py ZLAB RUN EXPORT\n")
        return 2
    zlab, run, export = map(Path, sys.argv[1:])
    question, answers = ours(run, export)
    with tempfile.TemporaryDirectory() as directory:
        request = Path(directory) / "request.json"
        request.write_text(json.dumps(question))
        environment = os.environ | {"PYTHONPATH": str(zlab.absolute()), "PYTHONSAFEPATH": "1"}
        command = (sys.executable, "-W", "ignore", str(Path(__file__).absolute()), "--theirs", str(request))
        subprocess.run(command, env=environment, cwd=directory, check=True)
        found = json.loads(request.read_text())
    for number, (here, there) in enumerate(zip(answers, found, strict=True)):
        same = "equal" if here["tokens"] == there["tokens"] else "DIFFERENT"
        sys.stdout.write(f"prompt {number}: tokens {same}, {len(here['committed'])} rounds, z-lab {len(there['committed'])}\n")
    equal = sum(here["tokens"] == there["tokens"] for here, there in zip(answers, found, strict=True))
    rounds, theirs_rounds = (sum(len(answer["committed"]) for answer in side) for side in (answers, found))
    sys.stdout.write(f"tokens of {equal} of {len(answers)} prompts equal, {rounds} rounds, z-lab {theirs_rounds}\n")
    return 0 if equal == len(answers) and abs(rounds - theirs_rounds) <= MOST_ROUNDS_APART * rounds else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent)) if "--theirs" not in sys.argv else None
    sys.exit(main())
