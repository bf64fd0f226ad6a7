from pathlib import Path

from dflash.config import PrepareConfig
from dflash.data.prompts import load_prompts


def test_a_prompt_that_is_no_text_is_listed_and_the_others_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"id": "bad", "prompt": "a\\ud800b"}\n{"id": "good", "prompt": "a\\ud83d\\ude00b"}\n{"id": "\\ud800", "prompt": "c"}\n'
    )
    loaded = load_prompts(PrepareConfig(prompts=str(file), output=tmp_path / "out"))
    assert [prompt.sample_id for prompt in loaded.prompts] == ["good"]
    assert loaded.skipped == [
        ("bad", "a lone surrogate, which is no text"),
        ("line 3", "an id with a lone surrogate, which is no text"),
    ]
