"""Requests become the token ids that transformers makes, user text is inert, and whatever does not fit is named."""

import functools
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor

import checkpoints
import pytest
import torch
from checkpoint_tokenizers import byte_level, sentencepiece_like
from engines import plain as loaded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmprefill.config import PrefillConfig
from mmprefill.encoders import families
from mmprefill.encoders.inert import Controls, Inert, RenamedTokenizer
from mmprefill.encoders.text import Intake
from mmprefill.errors import MediaError, MediaLimitError, PlaceholderError, PromptTooLongError, RequestError
from mmprefill.types import Rendered, Request

ALL = [*checkpoints.FAMILIES, *checkpoints.GENERIC]
WITH_TEMPLATE = [family for family in ALL if not family.startswith("paligemma")]
# Qwen's byte-level BPE, Llama 3's with BOS, SmolLM's, a dummy prefix, Gemma's "▁", and no template at all.
STYLES = ("qwen2_vl", "idefics3", "smolvlm", "llava_clip", "gemma3", "mistral3", "paligemma")
WORD = "zqz"  # innocuous, and in no checkpoint's tokens


@functools.cache
def intake(family, **limits):
    model, processor = loaded(family)
    return Intake(processor, families.describe(model).placeholders, PrefillConfig(**limits), 8192)


def ids_of(family, prompt, pictures=()):
    if family.startswith("paligemma") and not pictures:
        pictures = [checkpoints.picture(0)]  # its processor demands one
    return intake(family).prepare(Request(prompt=prompt, images=list(pictures))).input_ids


def stock_ids(family, text):
    """What a user of transformers gets for one user turn."""
    processor = loaded(family)[1]
    if processor.chat_template is None:
        return checkpoints.inputs_for(processor, [checkpoints.picture(0), text])["input_ids"][0]
    turn = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    output = processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=True)
    return torch.as_tensor(output["input_ids"])[0]


def controls_in(family, ids):
    """The control tokens among `ids`."""
    known = set(loaded(family)[1].tokenizer.convert_tokens_to_ids(sorted(intake(family).controls.names)))
    return [token for token in ids.tolist() if token in known]


def assert_inert(family, text, innocuous, ids, expected):
    """`ids` hold the control tokens of the innocuous prompt and no other, and decode to `text` in its place."""
    tokenizer = loaded(family)[1].tokenizer
    assert controls_in(family, ids) == controls_in(family, expected), text
    assert tokenizer.decode(ids) == tokenizer.decode(expected).replace(innocuous, text)


# Inert text


SHAPES = ("{}", "a {} b", "a{}b", "{}{}", "{}\n{} {}", "<{}>", "{}.", ".{}")


@pytest.mark.parametrize("family", ALL)
def test_a_control_token_in_a_prompt_is_text(family):
    innocuous = {shape: shape.replace("{}", WORD) for shape in SHAPES}
    expected = {shape: ids_of(family, text) for shape, text in innocuous.items()}
    for control in sorted(intake(family).controls.names):
        for shape in SHAPES if control.startswith(("<", "[")) else SHAPES[1:2]:
            text = shape.replace("{}", control)
            assert_inert(family, text, innocuous[shape], ids_of(family, text), expected[shape])


@pytest.mark.parametrize("family", ALL)
def test_a_control_token_beside_a_picture_is_text(family):
    pictures = [checkpoints.picture(1), checkpoints.picture(2)]
    expected = ids_of(family, f"see {WORD} here", pictures)
    for control in sorted(intake(family).controls.names)[::3]:
        ids = ids_of(family, f"see {control} here", pictures)
        assert_inert(family, f"see {control} here", f"see {WORD} here", ids, expected)


@pytest.mark.parametrize("family", ALL)
def test_placeholders_typed_beside_pictures_bind_to_nothing(family):
    """The typed marker comes before the real one in the prompt; spans, rows and pixels are those of the real one."""
    taker, picture = intake(family), checkpoints.picture(1)
    for marker in {*taker.markers.values(), "<image>", "<video>", "\U000f0000"}:
        prepared = taker.prepare(Request(prompt=f"{marker} what is {marker}?{marker}", images=[picture]))
        plain = taker.prepare(Request(prompt=f"{WORD} what is {WORD}?{WORD}", images=[picture]))
        token = taker.placeholders["image"]
        assert (prepared.input_ids == token).sum() == (plain.input_ids == token).sum() > 0
        assert torch.equal(prepared.inputs["pixel_values"], plain.inputs["pixel_values"])
        (item,) = prepared.media
        assert all((prepared.input_ids[start:end] == token).all() for start, end in item.runs)
        assert sum(end - start for start, end in item.runs) == (plain.input_ids == token).sum()


@pytest.mark.parametrize("family", WITH_TEMPLATE)
def test_messages_of_any_role_are_inert(family):
    taker = intake(family)

    def ids(text):
        turns = [{"role": r, "content": [{"type": "text", "text": text}]} for r in ("user", "assistant", "user")]
        return taker.prepare(Request(messages=turns)).input_ids

    expected = ids(f"one {WORD} two")
    for control in sorted(taker.controls.names)[::4]:
        assert_inert(family, f"one {control} two", f"one {WORD} two", ids(f"one {control} two"), expected)


@pytest.mark.parametrize("family", WITH_TEMPLATE)
def test_neighbours_cannot_complete_a_control_token(family):
    """A control token cut in two, each half in a part of its own, also with white space that templates trim."""
    taker = intake(family)

    def ids(*texts):
        content = [{"type": "text", "text": text} for text in texts]
        return taker.prepare(Request(messages=[{"role": "user", "content": content}])).input_ids

    expected = controls_in(family, ids("zq", "z"))
    for control in sorted(taker.controls.names)[::2]:
        for cut in {1, len(control) // 2, len(control) - 1} - {0, len(control)}:
            for pieces in ((control[:cut], control[cut:]), (f"a {control[:cut]} ", f"\n{control[cut:]} b")):
                assert controls_in(family, ids(*pieces)) == expected, pieces


@pytest.mark.parametrize("family", STYLES)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mixture_with_control_tokens_is_inert(family, data):
    names = sorted(intake(family).controls.names)
    pieces = st.sampled_from([*names[:12], *(n[1:] for n in names[:6]), *(n[:-1] for n in names[:6])])
    filler = st.text("ab 1\n<|>[]\ue000\ue001\U000f0000é", max_size=4)
    text = "".join(data.draw(st.lists(pieces | filler, min_size=1, max_size=6)))
    ids = ids_of(family, f"a{text}b")
    assert controls_in(family, ids) == controls_in(family, ids_of(family, f"a{WORD}b"))
    tokenizer = loaded(family)[1].tokenizer
    assert f"a{text}b" in tokenizer.decode(ids).replace("\ufffd", "")


def test_private_use_characters_are_the_users_own():
    for family in STYLES:
        for text in (
            "\ue000 and \ue001",
            "\ue000<image>\ue000",
            "\ue0000\ue001 <image>",
            "\U000f0000<image>\U000f0001",
        ):
            ids = ids_of(family, text)
            assert text in loaded(family)[1].tokenizer.decode(ids)


@given(st.lists(st.text("ab<>", min_size=1, max_size=4), min_size=1, max_size=6), st.text("ab<>", max_size=12))
def test_the_longest_control_token_matches_first(names, text):
    ordered = sorted({*names, "\U000f0000", "\U000f0001"}, key=len, reverse=True)
    plain = re.compile("|".join(map(re.escape, ordered)))
    assert [m.span() for m in Controls(names).pattern.finditer(text)] == [m.span() for m in plain.finditer(text)]


def test_a_page_of_markup_is_searched_at_once_among_thousands_of_tokens():
    """Gemma 3 has 6242 <unused...> tokens."""
    controls = Controls(f"<unused{i}>" for i in range(6242))
    page = "<p>hello <b>world</b></p> <unused7> text\n" * 2000
    started = time.perf_counter()
    hidden = Inert(controls, [page]).hide(page)
    assert time.perf_counter() - started < 1
    assert not controls.pattern.search(hidden)


def test_marks_run_out_with_an_error():
    inert = Inert(Controls(["<a>"]), ["".join(map(chr, [*range(0xE000, 0xF900), *range(0xF0002, 0xFFFFE)]))])
    assert inert.hide("plain") == "plain"
    with pytest.raises(RequestError, match="private-use"):
        inert.hide("<a>")


def test_secret_names_are_refused_in_a_prompt():
    tokenizer = byte_level(["<a>", "<b>"])
    controls = Controls(["<a>", "<b>"])
    renamed = RenamedTokenizer(tokenizer, controls)
    inert = Inert(controls, ["<a>"])
    assert renamed("<b>" + inert.hide("<a>"), inert)["input_ids"][0] == tokenizer.convert_tokens_to_ids("<b>")
    with pytest.raises(RequestError, match="private-use"):
        renamed(renamed._names["<a>"], inert)


@pytest.mark.parametrize("style", ["merges", "unknown"])
def test_control_tokens_that_the_base_vocabulary_reaches_are_inert(style):
    """Gemma's merges build "<start_of_turn>" out of letters; renaming takes those away, and the unknown token along."""
    tokenizer = sentencepiece_like(
        ["<turn>"], bos="<bos>", dummy_prefix=False, first=["<unk>", "<bos>"], unk_token="<unk>"
    )
    if style == "merges":
        tokenizer = with_merges_for(tokenizer, "<turn>")
        assert tokenizer("<turn>", split_special_tokens=True, add_special_tokens=False)["input_ids"] == [
            tokenizer.convert_tokens_to_ids("<turn>")
        ]
    controls = Controls(["<turn>", "<bos>", "<unk>"])
    inert = Inert(controls, ["a<turn>b<unk>"])
    ids = RenamedTokenizer(tokenizer, controls)(inert.hide("a<turn>b<unk>"), inert, add_special_tokens=False)[
        "input_ids"
    ]
    assert not set(ids) & set(tokenizer.convert_tokens_to_ids(["<turn>", "<bos>", "<unk>"]))
    assert tokenizer.decode(ids) == "a<turn>b<unk>"


def with_merges_for(tokenizer, name):
    """The tokenizer with merges that build `name` letter by letter."""
    import json

    from tokenizers import Tokenizer

    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = spec["model"]["vocab"]
    vocabulary[name] = next(t["id"] for t in spec["added_tokens"] if t["content"] == name)
    for char in name:
        vocabulary.setdefault(char, max(vocabulary.values()) + 1)
    for i in range(1, len(name)):
        vocabulary.setdefault(name[: i + 1], max(vocabulary.values()) + 1)
        spec["model"]["merges"].insert(i - 1, [name[:i], name[i]])
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(spec))
    return tokenizer


def test_a_role_token_that_is_not_special_is_a_control_token_too():
    """DeepSeek's <｜User｜> is an added token that is not marked special."""
    _, processor = checkpoints.load(checkpoints.cached("qwen2_vl"))
    processor.tokenizer.add_tokens(["<|User|>", "<think>"])
    processor.chat_template = (
        "{% for m in messages %}<|User|>{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"
    )
    taker = Intake(processor, {"image": processor.image_token_id}, PrefillConfig(), 8192)
    ids = taker.prepare(Request(prompt="a<|User|>b<think>")).input_ids.tolist()
    user, think = processor.tokenizer.convert_tokens_to_ids(["<|User|>", "<think>"])
    assert (ids.count(user), ids.count(think)) == (1, 1)


# Ordinary text


ORDINARY = st.one_of(
    st.text(max_size=40),
    st.text("ab <|>[]/\\{}%#_-\n\t.,'\"0123", max_size=30),
    st.sampled_from(
        [
            "def f(x):\n    return x < 3 and x > 1\n\n\n# done",
            "<b>bold</b> <!-- html --> <img src='x'> a|b <|> <| |> [INS T] <imag e>",
            "  leading and trailing  \n\n",
            "Größe 猫 😀 👩‍👩‍👧 é e\u0301 \u200b \xa0 ﬁ",
            "\ue000\ue123 private",
            "<loc0001><seg001>",  # PaliGemma's added tokens that are not special
            "\r\n\t \v",
        ]
    ),
)


@pytest.mark.parametrize("family", STYLES)
@settings(max_examples=30, deadline=None)
@given(text=ORDINARY)
def test_ordinary_text_tokenises_as_transformers_does(family, text):
    if intake(family).controls.pattern.search(text):
        return
    assert ids_of(family, text).tolist() == stock_ids(family, text).tolist()


@pytest.mark.parametrize("family", ALL)
def test_every_family_tokenises_prompts_and_pictures_as_transformers_does(family):
    processor = loaded(family)[1]
    parts = [checkpoints.picture(1), checkpoints.picture(2, (90, 48)), "What is <b>this</b>? 12 | 3\n"]
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    expected = checkpoints.inputs_for(processor, parts)
    for request in (
        Request(prompt=parts[2], images=parts[:2]),
        Request(prompt=Rendered(checkpoints.prompt_for(processor, parts)), images=parts[:2]),
        *([Request(messages=[{"role": "user", "content": content}])] if family in WITH_TEMPLATE else []),
    ):
        inputs = intake(family).prepare(request).inputs
        assert set(expected) - {"labels"} == set(inputs)
        for name, value in inputs.items():
            assert torch.equal(value, torch.as_tensor(expected[name])), name


def test_the_inert_path_merges_words_as_the_plain_one():
    """Text on both sides of a hidden token tokenises as without the renaming, up to the token itself."""
    for family in STYLES:
        before, after = "  The quick\n\nbrown 12 fox ", " jumps over it's lazy dog\n"
        ids, expected = (ids_of(family, before + middle + after).tolist() for middle in ("<image>", ""))
        common = sum(a == b for a, b in zip(ids, expected, strict=False))
        assert common > 6


# Live text


def test_rendered_text_is_live():
    taker = intake("qwen2_vl")
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>x<|im_end|>\n"
    ids = taker.prepare(Request(prompt=Rendered(text), images=[checkpoints.picture(1)])).input_ids.tolist()
    start = taker.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert ids[0] == start
    assert ids.count(taker.placeholders["image"]) == 4


@pytest.mark.parametrize("family", ALL)
@torch.inference_mode()
def test_expanded_ids_give_what_the_prompt_gives(family):
    model, taker = loaded(family)[0], intake(family)
    pictures = [checkpoints.picture(1), checkpoints.picture(2)]
    whole = taker.prepare(Request(prompt="Compare them.", images=pictures))
    again = taker.prepare(Request(input_ids=whole.input_ids.tolist(), images=pictures))
    assert set(whole.inputs) == set(again.inputs)
    for name, value in whole.inputs.items():
        assert torch.equal(value, again.inputs[name]), name
    assert whole.media == again.media
    if family in ("gemma3", "paligemma", "qwen2_5_vl", "gemma4"):
        logits = [model(**prepared.inputs).logits for prepared in (whole, again)]
        assert torch.equal(*logits)
        other = model(**taker.prepare(Request(prompt="Compare them.", images=pictures[::-1])).inputs).logits
        assert (other - logits[0]).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llava_clip", "qwen2_5_vl", "gemma3", "smolvlm"])
def test_ids_with_the_wrong_number_of_placeholders_are_refused(family):
    taker = intake(family)
    ids = taker.prepare(Request(prompt="x", images=[checkpoints.picture(1)])).input_ids.tolist()
    token = taker.placeholders["image"]
    count = ids.count(token)
    ids.insert(ids.index(token), token)
    with pytest.raises(PlaceholderError, match=f"{count + 1} image placeholder.*{count}"):
        taker.prepare(Request(id="r", input_ids=ids, images=[checkpoints.picture(1)]))
    with pytest.raises(PlaceholderError, match=f"{count + 1} image placeholder.*take 0"):
        taker.prepare(Request(input_ids=ids))


@pytest.mark.parametrize("ids", [[], [-1], [10**7], [[1, 2]], ["a"], [1.5, None]])
def test_malformed_ids_are_refused(ids):
    with pytest.raises(RequestError, match="'r': input_ids"):
        intake("qwen2_vl").prepare(Request(id="r", input_ids=ids))


def test_type_ids_are_built_for_frames_that_use_the_pictures_placeholder():
    """GLM-4V: 2 inside a video, though the token is the picture's."""
    taker = intake("glm4v")
    frames = [checkpoints.picture(i) for i in range(4)]
    whole = taker.prepare(Request(prompt="x", videos=[frames]))
    again = taker.prepare(Request(input_ids=whole.input_ids.tolist(), videos=[frames]))
    assert 2 in again.inputs["mm_token_type_ids"]
    assert torch.equal(whole.inputs["mm_token_type_ids"], again.inputs["mm_token_type_ids"])


# Counts and lengths


@pytest.mark.parametrize(
    "family", ["llava_clip", "qwen2_vl", "gemma3", "smolvlm", "internvl", "paligemma", "aya_vision"]
)
@pytest.mark.parametrize("placeholders", [0, 1, 2])
@pytest.mark.parametrize("pictures", [0, 1, 2])
def test_placeholders_and_pictures_must_agree(family, placeholders, pictures, monkeypatch):
    if placeholders == pictures:
        return
    taker = intake(family)
    monkeypatch.setattr("mmprefill.encoders.media.load_picture", None)  # counted before anything is decoded
    text = Rendered(f"What {taker.markers['image'] * placeholders} is it?")
    with pytest.raises(PlaceholderError, match=rf"'r': {placeholders} image placeholder.*{pictures} image\(s\) given"):
        taker.prepare(Request(id="r", prompt=text, images=[checkpoints.picture(1)] * pictures))


def test_media_that_the_model_cannot_take_are_refused():
    frames = [checkpoints.picture(1)] * 2
    for request in (
        Request(prompt="x", videos=[frames]),
        Request(prompt=Rendered("x"), videos=[frames]),
        Request(messages=[{"role": "user", "content": [{"type": "video", "video": frames}]}]),
        Request(input_ids=[5], videos=[frames]),
    ):
        with pytest.raises(PlaceholderError, match="takes no videos"):
            intake("llava_clip").prepare(request)


def test_a_template_that_drops_a_picture_is_caught():
    _, processor = checkpoints.load(checkpoints.cached("qwen2_vl"))
    processor.chat_template = "{% for m in messages %}{{ m['content'][-1]['text'] }}{% endfor %}"
    taker = Intake(processor, {"image": processor.image_token_id}, PrefillConfig(), 8192)
    with pytest.raises(PlaceholderError, match=r"0 image placeholder.*1 image\(s\)"):
        taker.prepare(Request(prompt="x", images=[checkpoints.picture(1)]))


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma4", "smolvlm"])
def test_a_long_prompt_is_refused_with_its_split(family):
    whole = intake(family).prepare(Request(prompt="word " * 50, images=[checkpoints.picture(1)]))
    total = len(whole.input_ids)
    rows = int((whole.input_ids == intake(family).placeholders["image"]).sum())
    request = Request(id="r", prompt="word " * 50, images=[checkpoints.picture(1)])
    assert len(intake(family, max_tokens=total).prepare(request).input_ids) == total
    with pytest.raises(PromptTooLongError, match=r"PrefillConfig\.max_tokens") as caught:
        intake(family, max_tokens=total - 1).prepare(request)
    assert (caught.value.text_tokens, caught.value.media_tokens, caught.value.limit) == (total - rows, rows, total - 1)
    short = Intake(loaded(family)[1], intake(family).placeholders, PrefillConfig(), total - 1)
    with pytest.raises(PromptTooLongError, match="the model's context"):
        short.prepare(request)


def test_a_picture_of_too_many_tokens_is_refused():
    """A cap for each picture, whatever the context allows; the option that lifts it is named (H1)."""
    small, large = checkpoints.picture(1, (64, 48)), checkpoints.picture(2, (300, 260))
    request = Request(id="r", prompt="x", images=[small, large])
    rows = [sum(end - start for start, end in item.runs) for item in intake("qwen2_vl").prepare(request).media]
    assert intake("qwen2_vl", max_picture_tokens=rows[1]).prepare(request).media
    with pytest.raises(MediaLimitError, match=rf"'r', medium 2 .*300 x 260.* {rows[1]} tokens.*max_picture_tokens"):
        intake("qwen2_vl", max_picture_tokens=rows[1] - 1).prepare(request)


def test_nothing_is_truncated_even_where_the_tokenizer_says_so():
    _, processor = checkpoints.load(checkpoints.cached("qwen2_vl"))
    processor.tokenizer.model_max_length = 16
    processor.tokenizer.backend_tokenizer.enable_truncation(8)
    processor.tokenizer.init_kwargs |= {"max_length": 8, "truncation": True}
    taker = Intake(processor, intake("qwen2_vl").placeholders, PrefillConfig(), 8192)
    request = Request(prompt="word " * 30, images=[checkpoints.picture(1)])
    assert torch.equal(taker.prepare(request).input_ids, intake("qwen2_vl").prepare(request).input_ids)


# No template, and PaliGemma


def test_messages_without_a_template_say_what_is_missing():
    message = [{"role": "user", "content": "hello"}]
    with pytest.raises(RequestError, match=r"chat_template\.jinja.*Rendered"):
        intake("paligemma").prepare(Request(messages=message))


def test_a_checkpoint_without_its_template_takes_plain_prompts():
    _, processor = checkpoints.load(checkpoints.cached("qwen2_vl"))
    processor.chat_template = processor.tokenizer.chat_template = None
    taker = Intake(processor, intake("qwen2_vl").placeholders, PrefillConfig(), 8192)
    ids = taker.prepare(Request(prompt="hello there")).input_ids
    assert taker.tokenizer.decode(ids) == "hello there"
    with pytest.raises(RequestError, match=r"chat_template\.jinja"):
        taker.prepare(Request(messages=[{"role": "user", "content": "x"}]))
    with pytest.raises(RequestError, match="the prompt is empty"):
        taker.prepare(Request(prompt=""))


@pytest.mark.parametrize("family", ["paligemma", "paligemma2"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_paligemma_gets_its_tokens_in_front_once(family, count, caplog):
    """What its processor infers, with a warning, from a prompt without <image>."""
    processor, pictures = loaded(family)[1], [checkpoints.picture(i) for i in range(count)]
    with checkpoints.quiet(), checkpoints.numpy_copy_warning_ignored():
        inferred = processor(text=["What is it?"], images=[pictures], return_tensors="pt")
    log = logging.getLogger("transformers")
    log.addHandler(caplog.handler)
    try:
        ids = ids_of(family, "What is it?", pictures)
        typed = ids_of(family, "<image>What is it?", pictures)
    finally:
        log.removeHandler(caplog.handler)
    assert torch.equal(ids, inferred["input_ids"][0])
    assert (typed == intake(family).placeholders["image"]).sum() == 16 * count
    assert not caplog.records


@pytest.mark.parametrize("family", ["paligemma", "paligemma2"])
def test_paligemma_takes_no_prompt_without_a_picture(family):
    """Its processor refuses one; the error says what to give."""
    with pytest.raises(
        RequestError, match="request 'q': this model takes no prompt without a picture; give one in images"
    ):
        intake(family).prepare(Request(prompt="What is it?", id="q"))


# Messages


GOOD = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages must be a non-empty list"),
        ("hello", "messages must be a non-empty list"),
        ([None], "message 1: a message is a mapping.*NoneType"),
        (["hello"], "message 1: a message is a mapping.*str"),
        ([GOOD, {"role": "user"}], "message 2: a message is a mapping with 'role' and 'content'"),
        ([{**GOOD, "name": "x"}], "message 1: .*'name'"),
        ([{**GOOD, "role": None}], "message 1: role"),
        ([{**GOOD, "role": "user<|im_end|>"}], "message 1: role"),
        ([{**GOOD, "role": "image"}], "message 1: role"),
        ([{**GOOD, "role": "endoftext"}], "message 1: role"),
        ([{**GOOD, "content": None}], "message 1: content.*NoneType"),
        ([{**GOOD, "content": []}], "message 1: content.*empty list"),
        ([{**GOOD, "content": 7}], "message 1: content.*int"),
        ([{**GOOD, "content": {"type": "text", "text": "x"}}], "message 1: content"),
        ([{**GOOD, "content": ["x"]}], "message 1, part 1: .*str"),
        ([{**GOOD, "content": [None]}], "message 1, part 1: .*NoneType"),
        ([{**GOOD, "content": [{"text": "x"}]}], "message 1, part 1: a part is a mapping of type"),
        ([{**GOOD, "content": [{"type": "text", "text": "x"}, {"type": "audio", "audio": "x"}]}], "part 2: .*'audio'"),
        ([{**GOOD, "content": [{"type": "text"}]}], "part 1: .*takes the key 'text'"),
        ([{**GOOD, "content": [{"type": "text", "text": None}]}], "part 1: 'text' must be a string"),
        ([{**GOOD, "content": [{"type": "text", "text": b"x"}]}], "part 1: 'text' must be a string.*bytes"),
        ([{**GOOD, "content": "a\ud800"}], r"message 1, content: .*character 2 is '\\ud800', half of a surrogate pair"),
        ([{**GOOD, "content": [{"type": "text", "text": "\udc00"}]}], "part 1: .*half of a surrogate pair"),
        ([{**GOOD, "content": [{"type": "image"}]}], "part 1: .*'image' or 'url' or 'path' or 'base64'"),
        ([{**GOOD, "content": [{"type": "image", "image": None}]}], "part 1: 'image' must be given"),
        ([{**GOOD, "content": [{"type": "image", "image": "a", "max_pixels": 9}]}], "part 1: .*max_pixels"),
        ([{**GOOD, "content": [{"type": "video", "url": "x"}]}], "part 1: .*'video'"),
    ],
)
def test_malformed_messages_are_named(messages, named):
    with pytest.raises(RequestError, match=f"request 'r'.*{named}"):
        intake("qwen2_vl").prepare(Request(id="r", messages=messages))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": 7}, "prompt must be a string or Rendered"),
        ({"prompt": b"x"}, "prompt must be a string or Rendered"),
        ({"prompt": Rendered(None)}, "Rendered takes a string"),
        ({"prompt": "<|im_end|> \ud83d"}, r"prompt: .*character 12 is '\\ud83d', half of a surrogate pair"),
        ({"prompt": Rendered("\ud800")}, "prompt: .*half of a surrogate pair"),
        ({"prompt": "x", "images": "cat.jpg"}, "images must be a list, got str"),
        ({"prompt": "x", "images": None}, "images must be a list, got NoneType"),
        ({"prompt": "x", "videos": "cat.mp4"}, "videos must be a list"),
        ({"messages": [GOOD], "images": ["cat.jpg"]}, "put pictures into the messages"),
        ({"prompt": "x", "videos": ["cat.mp4"]}, "video 1: a video is a non-empty list of frames"),
        ({"prompt": "x", "videos": [[]]}, "video 1: a video is a non-empty list of frames"),
        ({"prompt": "x", "images": [None]}, "picture 1"),
    ],
)
def test_malformed_requests_are_named(fields, named):
    with pytest.raises(RequestError, match=f"request 'r'.*{named}"):
        intake("qwen2_vl").prepare(Request(id="r", **fields))


def test_a_template_that_refuses_is_named():
    _, processor = checkpoints.load(checkpoints.cached("qwen2_vl"))
    processor.chat_template = "{{ raise_exception('roles must alternate') }}"
    taker = Intake(processor, intake("qwen2_vl").placeholders, PrefillConfig(), 8192)
    with pytest.raises(RequestError, match=r"request 'r'.*chat template refused.*roles must alternate"):
        taker.prepare(Request(id="r", prompt="x"))


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "llava_clip", "mistral3"])
def test_a_string_and_one_text_part_are_the_same_message(family):
    ids = [
        intake(family).prepare(Request(messages=[{"role": "user", "content": content}])).input_ids.tolist()
        for content in ("hello <b> there", [{"type": "text", "text": "hello <b> there"}])
    ]
    assert ids[0] == ids[1] == ids_of(family, "hello <b> there").tolist()


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}"
        "{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m['content'] + '' }}{% endfor %}",
    ],
    ids=["takes only lists", "takes only strings"],
)
def test_content_is_given_in_the_form_that_the_template_takes(template):
    """Published templates drop strings silently, or raise on lists."""
    _, processor = checkpoints.load(checkpoints.cached("qwen2_vl"))
    processor.chat_template = template
    taker = Intake(processor, intake("qwen2_vl").placeholders, PrefillConfig(), 8192)
    for content in ("hello", [{"type": "text", "text": "hello"}]):
        ids = taker.prepare(Request(messages=[{"role": "user", "content": content}])).input_ids
        assert taker.tokenizer.decode(ids) == "hello"


def test_history_is_rendered_in_its_own_order():
    taker = intake("qwen2_vl")
    turns = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "one"}, {"type": "image", "image": checkpoints.picture(1)}],
        },
        {"role": "assistant", "content": "two"},
        {
            "role": "user",
            "content": [{"type": "image", "image": checkpoints.picture(2)}, {"type": "text", "text": "three"}],
        },
    ]
    prepared = taker.prepare(Request(messages=turns))
    text = taker.tokenizer.decode(prepared.input_ids)
    places = [text.index(word) for word in ("Be brief", "one", "<|image_pad|>", "two", "three")]
    assert places == sorted(places)
    (first, *_), (second, *_) = (item.runs for item in prepared.media)
    two = taker.tokenizer.decode(prepared.input_ids[first[1] : second[0]])
    assert "two" in two
    assert "one" not in two


# Threads and noise


@pytest.mark.parametrize("family", ["qwen2_vl", "smolvlm", "gemma4", "idefics3", "paligemma"])
def test_sixteen_threads_share_one_processor(family):
    _, processor = checkpoints.load(checkpoints.cached(family))
    processor.tokenizer.backend_tokenizer.enable_truncation(5)  # state that the first call has to undo
    taker = Intake(processor, intake(family).placeholders, PrefillConfig(), 8192)
    requests = [
        Request(
            prompt=f"What is {'<image>' * (i % 3)} in number {i}?",
            images=[checkpoints.picture(i, (48 + 8 * (i % 5), 48))],
        )
        for i in range(48)
    ]
    expected = [intake(family).prepare(request).inputs for request in requests]
    with ThreadPoolExecutor(16) as pool:
        results = [prepared.inputs for prepared in pool.map(taker.prepare, requests)]
    for one, other in zip(expected, results, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")  # MiniCPM's video processor
@pytest.mark.parametrize("family", ALL)
def test_nothing_is_logged(family, caplog):
    """transformers warns once per process: clear its memory first."""
    from transformers.utils import logging as noise

    noise.warning_once.cache_clear()
    log = logging.getLogger("transformers")
    log.addHandler(caplog.handler)
    try:
        taker = intake(family)
        ids_of(family, "a <image> b " + "word " * 2000, [checkpoints.picture(1)])
        if "video" in taker.markers:
            taker.prepare(Request(prompt="x", videos=[[checkpoints.picture(i) for i in range(4)]]))
    finally:
        log.removeHandler(caplog.handler)
    assert not caplog.records


def test_a_picture_that_the_processor_refuses_is_named():
    pictures = [checkpoints.picture(1), checkpoints.picture(2, (603, 3))]
    with pytest.raises(MediaError, match=r"request 'r', picture 2 \(603 x 3\).*aspect ratio"):
        intake("qwen2_vl").prepare(Request(id="r", prompt="x", images=pictures))
    assert len(intake("qwen2_vl").prepare(Request(prompt="x", images=[checkpoints.picture(1, (600, 3))])).media) == 1


def test_spans_are_those_of_the_final_prompt():
    """A template that drops what was thought in earlier turns moves everything behind it; the spans follow (B21)."""
    _, processor = checkpoints.load(checkpoints.cached("qwen2_vl"))
    processor.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
        "{{ m['content'].split('</think>')[-1] }}{% else %}{% for p in m['content'] %}"
        "{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% else %}{{ p['text'].split('</think>')[-1] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    )
    taker = Intake(processor, intake("qwen2_vl").placeholders, PrefillConfig(), 8192)

    def turns(thought):
        pictures = [{"type": "image", "image": checkpoints.picture(i, (64 + 40 * i, 48))} for i in range(2)]
        return [
            {"role": "user", "content": [pictures[0], {"type": "text", "text": "first"}]},
            {"role": "assistant", "content": f"{thought}A cat."},
            {"role": "user", "content": [pictures[1], {"type": "text", "text": "second"}]},
        ]

    thinking, plain = (taker.prepare(Request(messages=turns(t))) for t in ("<think>" + "hm " * 50 + "</think>", ""))
    assert torch.equal(thinking.input_ids, plain.input_ids)
    assert [item.runs for item in thinking.media] == [item.runs for item in plain.media]
    for item in thinking.media:
        for start, end in item.runs:
            assert (thinking.input_ids[start:end] == taker.placeholders["image"]).all()
