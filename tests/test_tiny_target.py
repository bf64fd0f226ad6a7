"""The tiny target and the text it is made from: tokenizer, split, prompts, committed weights, and its builder's bounds."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from fixtures import stdlib_text, tiny_target
from fixtures.stdlib_text import Pair, SourceFile, cut_pairs, largest, read_corpus, sample_pairs, split_of
from fixtures.tiny_target import build, quality, recipe
from fixtures.tiny_target.quality import Bounds, Quality, bits_per_byte, check, greedy_answers, is_loop
from fixtures.tiny_target.training import Schedule, make_stream

TOKENIZER = recipe.make_tokenizer()
# A special token written out in a message becomes that token, as with every chat tokenizer.
PLAIN_TEXT = st.text().filter(lambda text: not any(token in text for token in recipe.SPECIAL_TOKENS))
OWN_PROMPTS = (
    "def read_lines(path):\n    with open(path) as file:",
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize",
    "    if not isinstance(value, int):\n        raise TypeError(",
    "import os\nimport sys\nimport threading",
)
LEAST_WORK = ("--device", "cpu", "--steps", "1", "--rows", "1", "--measure-pairs", "1", "--answers", "1")
GOOD = Quality(
    bits_per_byte=1.0,
    ended_share=1.0,
    looping_share=0.0,
    distinct_answers_share=1.0,
    relative_distinct_lines=1.0,
    relative_zlib_ratio=1.0,
    mean_answer_bytes=100.0,
)


@pytest.fixture(scope="module")
def loaded() -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    return tiny_target.load()


@pytest.fixture(scope="module")
def heldout() -> list[SourceFile]:
    return read_corpus("heldout")


@settings(deadline=None)
@given(st.lists(st.text() | st.sampled_from(recipe.SPECIAL_TOKENS)).map("".join))
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


@settings(deadline=None)
@given(PLAIN_TEXT)
def test_the_token_of_a_byte_is_its_value(text: str) -> None:
    assert TOKENIZER(text)["input_ids"] == list(text.encode())


@settings(deadline=None)
@given(PLAIN_TEXT, PLAIN_TEXT)
def test_the_generation_mask_covers_exactly_the_answer_and_its_end_token(prompt: str, answer: str) -> None:
    chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    encoded = TOKENIZER.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    covered = [token for token, is_covered in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if is_covered]
    assert covered == [*answer.encode(), TOKENIZER.eos_token_id]


@settings(deadline=None)
@given(PLAIN_TEXT, PLAIN_TEXT)
def test_pairs_are_encoded_as_the_chat_template_does(prompt: str, answer: str) -> None:
    chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    question = TOKENIZER.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert question == recipe.encode_prompt(prompt)
    pair = Pair(name="a.py", line=1, start=0, prompt=prompt, answer=answer)
    assert TOKENIZER.apply_chat_template(chat, return_dict=True)["input_ids"] == recipe.encode_pair(pair)


def test_the_committed_tokenizer_is_the_recipes(loaded: tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]) -> None:
    tokenizer = loaded[1]
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert tokenizer.chat_template == recipe.CHAT_TEMPLATE
    special = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id)
    assert special == (recipe.PAD_ID, recipe.END_ID, recipe.MASK_ID)
    assert tokenizer(" a\n b")["input_ids"] == list(b" a\n b")


def test_the_mask_token_never_occurs_in_the_data(heldout: list[SourceFile]) -> None:
    files = read_corpus("train") + heldout
    assert not [file.name for file in files if any(token in file.text for token in recipe.SPECIAL_TOKENS)]
    stream = make_stream(heldout, schedule=Schedule(steps=1, rows=1), seed=0)
    assert set(stream.ids.tolist()) & set(range(recipe.NUM_BYTES, recipe.VOCABULARY)) == {recipe.START_ID, recipe.END_ID}


def test_the_mask_tokens_row_is_far_from_those_of_the_text(
    loaded: tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast], heldout: list[SourceFile]
) -> None:
    table = loaded[0].get_input_embeddings().weight.detach()
    distance = (table - table[recipe.MASK_ID]).norm(dim=1)
    assert (distance > 0).sum() == recipe.VOCABULARY - 1
    used = torch.tensor([recipe.START_ID, recipe.END_ID, *set("".join(file.text for file in heldout).encode("ascii", "ignore"))])
    assert distance[used].min() > 0.2 * table[recipe.MASK_ID].norm()


def test_every_row_of_the_stream_starts_a_chat_and_is_whole(heldout: list[SourceFile]) -> None:
    schedule = Schedule(steps=1, rows=1)
    stream = make_stream(heldout, schedule=schedule, seed=0)
    assert (stream.ids[stream.starts] == recipe.START_ID).all()
    assert int(stream.starts.max()) + schedule.row_tokens < len(stream.ids)


def test_a_file_is_in_one_split_that_only_its_name_decides(heldout: list[SourceFile]) -> None:
    train_names, heldout_names = ({file.name for file in files} for files in (read_corpus("train"), heldout))
    assert train_names.isdisjoint(heldout_names)
    assert sorted(train_names | heldout_names) == [
        name for name in stdlib_text.corpus_names(stdlib_text.library_root()) if name in train_names | heldout_names
    ]
    # Pinned: a change moves files that trained the committed weights into the held-out split.
    assert [split_of(name) for name in ("typing.py", "ast.py", "os.py", "json/decoder.py")] == ["heldout"] * 2 + ["train"] * 2


def test_tests_and_generated_tables_are_not_in_the_corpus(tmp_path: Path) -> None:
    kept = ["a.py", "json/tool.py"]
    for name in [*kept, "test/a.py", "unittest/test/b.py", "site-packages/c.py", "encodings/cp037.py", "_sysconfigdata_x.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert stdlib_text.corpus_names(tmp_path) == kept


def test_a_pair_is_a_slice_of_its_file_cut_where_a_statement_starts_and_a_line_ends(heldout: list[SourceFile]) -> None:
    for file in heldout:
        starts = [0] + [at + 1 for at, character in enumerate(file.text) if character == "\n"]
        for pair in cut_pairs(file, seed=0):
            text = pair.prompt + pair.answer
            assert file.text.startswith(text + "\n", starts[pair.line - 1])
            assert len(pair.prompt) in range(60, 201)
            assert len(pair.answer) in range(40, 221)
            assert pair.prompt == pair.prompt.rstrip()


def test_prompts_are_unique_and_a_larger_count_only_appends(heldout: list[SourceFile]) -> None:
    many = sample_pairs(heldout, count=1000, seed=7)
    assert len({pair.prompt for pair in many}) == len({pair.id for pair in many}) == 1000
    assert sample_pairs(heldout, count=50, seed=7) == many[:50]
    assert sample_pairs(heldout, count=50, seed=8) != many[:50]


def test_a_prompt_that_occurs_twice_is_given_once() -> None:
    text = "def first(value):\n    return value.strip().lower()\n\n\n" * 12
    copies = [SourceFile(name=f"{number}.py", text=text) for number in range(40)]
    num_unique = len({pair.prompt for file in copies for pair in cut_pairs(file, seed=0)})
    with pytest.raises(ValueError, match=r"ask for 0 to \d+") as caught:
        sample_pairs(copies, count=10_000, seed=0)
    num_given = int(str(caught.value).rsplit(" ", 1)[1])
    assert num_given <= num_unique
    assert len({pair.prompt for pair in sample_pairs(copies, count=num_given, seed=0)}) == num_given


def test_no_two_pairs_share_a_character_of_a_file(heldout: list[SourceFile]) -> None:
    pairs = sorted(sample_pairs(heldout, count=1000, seed=3), key=lambda pair: (pair.name, pair.start))
    assert all(one.name != two.name or one.end <= two.start for one, two in itertools.pairwise(pairs))
    texts = {file.name: file.text for file in heldout}
    assert all(texts[pair.name][pair.start : pair.end] == pair.prompt + pair.answer for pair in pairs)


def test_the_largest_files_are_chosen(heldout: list[SourceFile]) -> None:
    chosen = largest(heldout, 3)
    assert sorted((len(file.text) for file in chosen), reverse=True) == sorted((len(f.text) for f in heldout), reverse=True)[:3]
    with pytest.raises(ValueError, match=f"ask for 1 to {len(heldout)}"):
        largest(heldout, len(heldout) + 1)


def test_the_command_writes_the_same_prompts_every_time(tmp_path: Path, heldout: list[SourceFile]) -> None:
    for name in ("a", "b"):
        assert stdlib_text.main(["--count", "30", "--seed", "3", "--split", "heldout", "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert rows == [{"id": pair.id, "prompt": pair.prompt} for pair in sample_pairs(heldout, count=30, seed=3)]


def test_more_prompts_than_there_are_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stdlib_text.main(["--count", "10000000", "--output", str(tmp_path / "p")]) == 2
    assert "ask for 0 to" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_the_committed_model_is_small(loaded: tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]) -> None:
    assert sum(path.stat().st_size for path in tiny_target.PATH.iterdir()) <= 6_000_000
    assert 1_000_000 <= loaded[0].num_parameters() <= 3_000_000


def test_the_committed_record_keeps_the_builders_bounds() -> None:
    record = json.loads((tiny_target.PATH / "build.json").read_text())
    assert check(Quality(**record["quality"]), Bounds()) == []


def test_the_committed_model_predicts_text_it_has_not_seen(
    loaded: tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast], heldout: list[SourceFile]
) -> None:
    assert bits_per_byte(loaded[0], sample_pairs(heldout, count=24, seed=1)) < Bounds().max_bits_per_byte


def test_bits_per_byte_is_that_of_each_pair_alone(
    loaded: tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast], heldout: list[SourceFile]
) -> None:
    model, pairs = loaded[0], sample_pairs(heldout, count=3, seed=1)
    bits = num_bytes = 0.0
    for pair in pairs:
        ids, start = torch.tensor([recipe.encode_pair(pair)]), len(recipe.encode_prompt(pair.prompt))
        with torch.inference_mode():
            log_probabilities = torch.log2(model(input_ids=ids).logits[0].softmax(-1))
        for at, byte in enumerate(pair.answer.encode(), start=start):
            bits -= log_probabilities[at - 1, byte].item()
            num_bytes += 1
    assert bits_per_byte(model, pairs) == pytest.approx(bits / num_bytes, rel=1e-4)


def test_most_greedy_answers_end_and_are_no_loops_and_all_depend_on_the_prompt(
    loaded: tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast],
) -> None:
    answers = greedy_answers(loaded[0], OWN_PROMPTS)
    assert sum(answer.ended for answer in answers) >= len(OWN_PROMPTS) - 1
    assert sum(is_loop(answer.text) for answer in answers) <= 1
    assert len({answer.text for answer in answers}) == len(OWN_PROMPTS)


@pytest.mark.parametrize("text", ["", "ab", "x = 1\n" * 20, "#" + " " * 200])
def test_repetition_and_emptiness_count_as_loops(text: str) -> None:
    assert is_loop(text)


def test_deep_indentation_is_no_loop() -> None:
    assert not is_loop("\n".join(" " * 40 + line for line in ("if ready:", "return self.value", "raise KeyError(name)")))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bits_per_byte", 1.7),
        ("bits_per_byte", float("nan")),
        ("ended_share", 0.5),
        ("looping_share", 0.5),
        ("distinct_answers_share", 0.5),
        ("relative_distinct_lines", 0.3),
        ("relative_zlib_ratio", 0.3),
    ],
)
def test_each_broken_bound_is_named(name: str, value: float) -> None:
    (failure,) = check(dataclasses.replace(GOOD, **{name: value}), Bounds())
    assert failure.startswith(name)
    assert check(GOOD, Bounds()) == []


def test_a_model_that_breaks_a_bound_is_not_published(
    tmp_path: Path, heldout: list[SourceFile], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "read_corpus", lambda _split: heldout)  # a tenth of the text, to be quick
    monkeypatch.setattr(quality, "MAX_ANSWER_TOKENS", 8)
    assert build.main(["--output", str(tmp_path / "model"), *LEAST_WORK]) == 1
    assert list(tmp_path.iterdir()) == []
    assert "bits_per_byte is" in capsys.readouterr().err


def test_a_used_output_directory_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    assert build.main(["--output", str(tmp_path), *LEAST_WORK]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_publishing_stores_what_was_measured(tmp_path: Path) -> None:
    model, _ = tiny_target.load()
    record = json.loads((tiny_target.PATH / "build.json").read_text())
    build.round_to_bfloat16(model)
    (tmp_path / "model").mkdir()
    build.publish(model, tmp_path / "model", record)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    again = Qwen3ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, parameter in tiny_target.load()[0].named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    assert {path.name for path in (tmp_path / "model").iterdir()} == {path.name for path in tiny_target.PATH.iterdir()}
