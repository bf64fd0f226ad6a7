from pathlib import Path

import pytest

from dflash.command_config import PrepareConfig
from dflash.data.meta import DataError
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


@pytest.mark.parametrize("named", [None, "text"])
def test_a_file_of_several_without_the_column_is_refused_and_never_skipped_whole(tmp_path: Path, named: str | None) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}\n{"other": "no prompt in this row"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "two", "label": 1}\n')
    config = PrepareConfig(prompts=str(tmp_path), output=tmp_path / "out", prompt_field=named)
    missing, found = ("a.jsonl", "other, prompt") if named else ("b.jsonl", "label, text")
    with pytest.raises(DataError, match=f"^{missing} has no field .*found {found}: leave that file out"):
        load_prompts(config)
