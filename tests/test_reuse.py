"""Reuse is exact and explained: pictures by content, prefixes across requests, whether finished or in flight."""

import asyncio
import copy
import functools
import gc
import time
import tracemalloc

import checkpoints
import pytest
import torch
from engines import cold, open_engine, open_prefiller

from mmprefill import Request
from mmprefill.pipeline.kv_cache import SequenceKV
from mmprefill.pipeline.prefix import BLOCK, TOKEN, PrefixStore, Spot, chain_of
from mmprefill.results import unwrap

EXACT = 1e-4
LONG = "one long beginning that several questions share, longer than a block of tokens, and then some more of it. "


@pytest.fixture(params=list(checkpoints.FAMILIES))
def pair(request):
    """A prefiller that reuses, and its family."""
    with open_prefiller(request.param) as warm:
        yield warm, request.param


@pytest.fixture
def smol():
    with open_prefiller("smolvlm") as prefiller:
        yield prefiller


def same(a, b):
    assert (a.next_token_logits - b.next_token_logits).abs().max() <= EXACT
    assert a.next_position == b.next_position
    for layer, pair in a.emitted.layers.items():
        for x, y in zip(pair, b.emitted.layers[layer], strict=True):
            assert (x[:, :, : a.emitted.length] - y[:, :, : b.emitted.length]).abs().max() <= EXACT


def questions(count=3):
    """Requests that begin the same, with a picture, and end in different questions."""
    picture = checkpoints.picture(1)
    return [Request(prompt=f"{LONG} question number {i}?", images=[picture]) for i in range(count)]


@functools.cache
def answers(family):
    """To four of them, from an engine that never reuses anything. Read only."""
    return [cold(family).prefill(request) for request in questions(4)]


def test_shared_prefixes_are_exact(pair):
    """With a finished prompt in the store, later ones that begin the same equal cold ones, and say what they reused."""
    warm, family = pair
    (first, *rest), (expected, *others) = questions(), answers(family)[:3]
    same(warm.prefill(first), expected)
    for request, expected in zip(rest, others, strict=True):
        result = warm.prefill(request)
        same(result, expected)
        assert result.reuse.tokens > BLOCK or "two-way span" in result.reuse.why, result.reuse


def test_prefixes_in_flight_are_awaited(pair):
    """Prompts that arrive together compute their common beginning once, and equal cold ones."""
    warm, family = pair
    results = [unwrap(outcome) for outcome in warm.prefill_many(questions(4))]
    for result, expected in zip(results, answers(family), strict=True):
        same(result, expected)
    reused = [result.reuse.tokens for result in results]
    assert sum(tokens > BLOCK for tokens in reused) == 3 or "two-way span" in results[-1].reuse.why


@pytest.mark.parametrize("family", ["paligemma", "gemma3"])
def test_a_shared_picture_that_must_be_encoded_again(family):
    """A prefix that ends inside a two-way span is of no use: the picture is encoded again, and nobody hangs."""
    with open_prefiller(family, encoder_bytes=0) as warm:
        for request, expected in zip(questions(4), answers(family), strict=True):
            outcome = warm._engine.submit(warm._engine.prefill(request)).result(30)
            same(outcome, expected)


def test_the_whole_prompt_again(pair):
    """The same request again costs nothing: stored logits and KV, equal to the first answer."""
    warm, _ = pair
    request = questions(1)[0]
    first = warm.prefill(request)
    steps = warm._engine._driver.steps
    again = warm.prefill(Request(prompt=request.prompt, images=request.images))
    assert warm._engine._driver.steps == steps
    assert torch.equal(first.next_token_logits, again.next_token_logits)
    assert again.reuse.tokens == len(again.token_ids)
    assert again.generate(2) == first.generate(2)


def test_same_words_different_pictures(pair):
    """Equal placeholders over different pictures share nothing behind the picture."""
    warm, family = pair
    red, green = (Request(prompt="what colour is it?", images=[checkpoints.picture(i)]) for i in (1, 2))
    warm.prefill(red)
    result = warm.prefill(green)
    same(result, cold(family).prefill(green))
    start = min(start for runs in result.spans for start, _ in runs)
    assert result.reuse.tokens <= start


def counted(prefiller, monkeypatch):
    """The number of pictures that the tower was given, as a list that grows."""
    from mmprefill.encoders import vision

    calls, original = [], vision.encode
    monkeypatch.setattr(vision, "encode", lambda family, batch: calls.extend(batch) or original(family, batch))
    return calls


@pytest.mark.parametrize("prefix_bytes", [0, 2**28])
def test_the_tower_runs_once_per_picture(monkeypatch, prefix_bytes):
    """4 pictures x 8 questions, all at once, then again: exactly 4 encodings."""
    with open_prefiller("smolvlm", prefix_bytes=prefix_bytes) as prefiller:
        calls = counted(prefiller, monkeypatch)
        requests = [Request(prompt=f"{q}?", images=[checkpoints.picture(p)]) for q in range(8) for p in range(4)]
        for _ in range(2):
            for outcome in prefiller.prefill_many(requests):
                unwrap(outcome)
        assert len(calls) == 4


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl", "gemma3"])
def test_chunks_encode_no_picture_again(monkeypatch, family):
    """Chunks of 3 tokens, text first, nothing kept of earlier prompts: the tower sees each distinct picture once (D11)."""
    request = Request(prompt="look at them", images=[checkpoints.picture(i) for i in (1, 2, 1)])
    expected = cold(family).prefill(request)
    with open_prefiller(family, prefix_bytes=0, encoder_bytes=0, chunk_tokens=3, early_tokens=1) as chunked:
        calls = counted(chunked, monkeypatch)
        for turn in (1, 2):
            same(chunked.prefill(request), expected)
            assert len(calls) == 2 * turn
        assert chunked._engine._driver.steps > 2 * 3  # more chunks than pictures


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm", "internvl", "mistral3", "gemma3", "llava_next"])
def test_pictures_are_encoded_one_by_one(monkeypatch, family):
    """A picture seen in an earlier turn is not encoded again when a new one joins it, and the answer is exact."""
    with open_prefiller(family) as warm:
        calls = counted(warm, monkeypatch)
        one, two = checkpoints.picture(1), checkpoints.picture(2)
        warm.prefill(Request(prompt="first", images=[one]))
        assert len(calls) == 1
        both = Request(prompt="both", images=[one, two])
        result = warm.prefill(both)
        assert len(calls) == 2
        assert result.reuse.pictures == 1
        same(result, cold(family).prefill(both))


def test_a_chat_that_resends_its_history(smol):
    """The second turn reuses the first one's tokens."""
    picture = checkpoints.picture(3)
    turn = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": LONG}]}]
    smol.prefill(turn)
    more = [*turn, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "And now?"}]
    result = smol.prefill(more)
    assert result.reuse.tokens >= 40
    assert "earlier prompt" in result.reuse.why


def test_salts_keep_tenants_apart(smol, monkeypatch):
    """Requests with different salts share neither prefixes nor pictures."""
    calls = counted(smol, monkeypatch)
    for salt in ("a", "b"):
        result = smol.prefill(Request(prompt=LONG, images=[checkpoints.picture(1)], salt=salt))
        assert result.reuse.tokens == result.reuse.pictures == 0
    assert len(calls) == 2


def test_misses_are_explained(smol):
    """`result.reuse.why` says why nothing was reused."""
    assert "no earlier prompt" in smol.prefill(LONG).reuse.why
    assert "asked for none" in smol.prefill(LONG, reuse=False).reuse.why
    with open_prefiller("smolvlm", prefix_bytes=0) as off:
        assert "off" in off.prefill(LONG).reuse.why
    with open_prefiller("lfm2_vl") as generic:
        assert "generic" in generic.prefill(LONG).reuse.why


def test_stored_kv_is_never_handed_out_mutable(smol):
    """Writing into an emitted cache does not change what the next request gets."""
    first = smol.prefill(LONG)
    before = first.next_token_logits.clone()
    for layer in first.cache.layers:
        layer.keys.zero_()
        layer.values.zero_()
    first.next_token_logits.zero_()
    again = smol.prefill(LONG)
    assert torch.equal(again.next_token_logits, before)
    assert all(float(layer.keys.abs().max()) > 0 for layer in again.cache.layers)


def test_hidden_states_are_computed_not_reused(smol):
    """A request that wants every token's states gets them all, whatever is stored."""
    smol.prefill(LONG)
    result = smol.prefill(LONG, hidden_states=(-1,), all_logits=True)
    assert result.reuse.tokens == 0
    assert len(result.hidden_states[-1]) == len(result.logits) == len(result.token_ids)


def test_stores_stay_within_their_bytes():
    """Many different prompts and pictures: neither store outgrows its limit, the oldest go first."""
    with open_prefiller("smolvlm", prefix_bytes=200_000, encoder_bytes=50_000) as prefiller:
        for i in range(30):
            prefiller.prefill(f"{i} {LONG}", images=[checkpoints.picture(i)])
        stores = prefiller._engine._stores
        assert 0 < stores.prefix.nbytes <= 200_000
        assert 0 < stores.encoder.nbytes <= 50_000
        assert prefiller.prefill(f"29 {LONG}", images=[checkpoints.picture(29)]).reuse.tokens > 0
        assert prefiller.prefill(f"0 {LONG}", images=[checkpoints.picture(0)]).reuse.tokens < BLOCK * 2


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl", "qwen3_vl", "llava_next"])
def test_kept_outputs_hold_what_they_count(family):
    """A kept encoder output keeps neither those of the pictures encoded with it nor the tower's insides."""
    with open_prefiller(family) as prefiller:
        prefiller.prefill("all", images=[checkpoints.picture(i) for i in range(3)])
        cache = prefiller._engine._stores.encoder
        held = {t.data_ptr(): t.untyped_storage() for each in cache._kept.values() for t in tensors(each.value)}
        assert sum(storage.nbytes() for storage in held.values()) == cache.nbytes
        assert {name for each in cache._kept.values() for name, value in each.value.items() if value is not None} <= {
            "pooler_output",
            "deepstack_features",
        }


def test_kept_prompts_take_what_they_count(smol):
    """KV, logits and positions by the memory behind them; for the chain a number of bytes that holds."""
    store = smol._engine._stores.prefix
    before = store.nbytes
    smol.prefill(LONG, images=[checkpoints.picture(77, (200, 200))])
    entry = next(reversed(store._kept))
    held = {
        t.untyped_storage().data_ptr(): t
        for t in (*tensors(list(entry.kv.layers.values())), entry.logits, entry.places)
    }
    tokens = len(entry.chain.tokens)
    assert store.nbytes - before == sum(t.untyped_storage().nbytes() for t in held.values()) + TOKEN * tokens


def test_a_chain_takes_no_more_than_is_counted_for_it():
    tracemalloc.start()
    chain = chain_of(list(range(10**6, 10**6 + 4096)), [Spot(b"k" * 32, ((100, 4000),))])
    assert tracemalloc.get_traced_memory()[0] <= TOKEN * len(chain.tokens)
    tracemalloc.stop()


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    children = value.values() if hasattr(value, "values") else value
    return [tensor for child in children if child is not None for tensor in tensors(child)]


def test_counting_bytes_copies_nothing(smol):
    """`kv_bytes` says what the cache has, before and after the user's own copy of it grows."""
    result = smol.prefill(LONG)
    before = result.kv_bytes
    assert "cache" not in vars(result)
    keys, values = result.cache.layers[0].keys, result.cache.layers[0].values
    result.cache.update(keys, values, 0)
    assert result.kv_bytes == before == result.emitted.nbytes


def test_a_cancelled_owner_leaves_followers_whole(smol):
    """When the request whose prefix others wait for is cancelled, they finish by themselves, exactly."""
    engine = smol._engine
    requests = questions()

    async def race():
        tasks = [asyncio.ensure_future(engine.prefill(request)) for request in requests]
        await asyncio.sleep(0.005)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(race())
    for outcome, expected in list(zip(outcomes, answers("smolvlm")[:3], strict=True))[1:]:
        same(unwrap(outcome), expected)


@pytest.fixture
def held(smol):
    """A prefiller whose lane is busy for a moment, so that requests meet while they are in flight."""
    smol.session.lane.submit(time.sleep, 0.3)
    return smol


def test_followers_of_a_request_that_came_to_nothing(held):
    """They compute for themselves, exactly, and say why."""
    engine, requests = held._engine, questions()

    async def race():
        tasks = [asyncio.ensure_future(engine.prefill(request)) for request in requests]
        await asyncio.sleep(0.1)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(race())
    assert isinstance(outcomes[0], asyncio.CancelledError)
    for outcome in outcomes[1:]:
        assert outcome.reuse.tokens or outcome.reuse.why, outcome.reuse


def test_what_is_shared_in_flight_is_never_handed_out_mutable():
    """Two results of one computation are two, even where nothing is kept behind them."""
    with open_prefiller("smolvlm", prefix_bytes=1) as prefiller:
        prefiller.session.lane.submit(time.sleep, 0.3)
        first, second = map(unwrap, prefiller.prefill_many([LONG, LONG]))
        assert {first.reuse.tokens, second.reuse.tokens} == {0, len(first.token_ids)}
        expected = second.generate(4)
        for layer in first.cache.layers:
            layer.keys.zero_()
            layer.values.zero_()
        assert second.generate(4) == expected
        assert prefiller.generate(LONG, 4) == expected


def test_a_prompt_is_kept_once(smol):
    """Computing what is stored already (for its hidden states, say) does not fill the store with copies of it."""
    smol.prefill(LONG)
    kept = smol._engine._stores.prefix.nbytes
    for _ in range(3):
        smol.embed(LONG)
    assert smol._engine._stores.prefix.nbytes == kept
    assert smol.prefill(LONG).reuse.tokens > 0


def test_watching_a_request():
    """Progress comes after each chunk, with KV that is already that of the end; the result comes last."""
    engine = open_engine("qwen2_5_vl", chunk_tokens=20)

    async def watch():
        return [update async for update in engine.watch(LONG, images=[checkpoints.picture(1)])]

    *progress, result = asyncio.run(watch())
    engine.close()
    assert [update.done for update in progress][-1] == len(result.token_ids)
    assert len(progress) > 2
    for update in progress:
        early = update.cache.layers[0].keys
        assert early.shape[2] == update.done
        assert torch.equal(early, result.cache.layers[0].keys[:, :, : update.done])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_watcher_that_is_gone(smol):
    """A watcher whose loop was closed under it does not disturb the requests that share its steps."""
    engine, loop = smol._engine, asyncio.new_event_loop()
    smol.session.lane.submit(time.sleep, 0.3)  # so that both are in one step
    task = loop.create_task(anext(engine.watch("watched", reuse=False)))
    loop.run_until_complete(asyncio.sleep(0.01))
    task._log_destroy_pending = False
    loop.close()
    result = smol.prefill("not watched", reuse=False)
    assert len(result.token_ids) == result.emitted.length
    del task
    gc.collect()


def test_a_block_outlives_the_prompt_that_brought_it():
    """When the owner of a shared beginning is evicted, a kept prompt that begins the same serves it."""

    def finished(store, ids):
        entry = store.register(chain_of(ids, []))
        entry.kv = SequenceKV(len(ids), length=len(ids), layers={0: (torch.zeros(1, 1, len(ids), 4),) * 2})
        store.finish(entry, torch.zeros(1, 8), torch.zeros(1, len(ids)), "causal")
        return entry

    common = list(range(BLOCK))
    size = finished(PrefixStore(10**6), [*common, *range(100, 120)]).nbytes
    store = PrefixStore(2 * size)
    finished(store, [*common, *range(100, 120)])
    second = finished(store, [*common, *range(200, 220)])
    finished(store, list(range(300, 300 + BLOCK + 20)))  # evicts the first
    match = store.match(chain_of([*common, 7, 8, 9], []))
    assert match is not None
    assert match.entry is second


def test_chains():
    """A chain changes with any token, any picture, its place and the salt, and a hash never covers a part only."""
    ids = list(range(50))
    spot = Spot(b"k" * 32, ((20, 30),))
    chain = chain_of(ids, [spot])
    assert len(chain.blocks) == 3
    assert chain == chain_of(ids, [spot])
    others = [
        chain_of([*ids[:-1], 99], [spot]),
        chain_of(ids, [Spot(b"j" * 32, ((20, 30),))]),
        chain_of(ids, [Spot(b"k" * 32, ((21, 31),))]),
        chain_of(ids, []),
        chain_of(ids, [spot], salt="a"),
    ]
    assert len({chain.whole, *(other.whole for other in others)}) == 6
    assert others[0].blocks == chain.blocks
    assert others[1].blocks[0] == chain.blocks[0] != others[4].blocks[0]
    assert PrefixStore(0).match(chain) is None


def test_a_broken_picture_takes_its_neighbours_along(monkeypatch):
    """When one picture of a request fails, those of its others that nobody else shows are not encoded any more."""
    from mmprefill.encoders import vision

    calls, original = [], vision.encode

    def fragile(family, batch):
        calls.extend(batch)
        if all((item.tensors["pixel_values"] < -0.99).all() for item in batch):
            raise RuntimeError("the tower broke")
        return original(family, batch)

    monkeypatch.setattr(vision, "encode", fragile)
    with open_prefiller("smolvlm", vision_patches=1) as prefiller:
        engine, pictures = prefiller._engine, [checkpoints.picture(i) for i in range(6)]
        pictures[0] = pictures[0].point(lambda _: 0)
        prefiller.session.lane.submit(time.sleep, 0.3)
        broken, sharing = prefiller.prefill_many(
            [Request(prompt="all six", images=pictures), Request(prompt="the last", images=pictures[-1:])]
        )
        assert isinstance(broken, RuntimeError)
        assert sharing.next_token_logits.isfinite().all()
        assert len(calls) == 2
        assert not engine._stores.encoder._flying
        assert not engine._driver._tower


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3"])
def test_a_second_turn_with_another_picture(family):
    """A chat goes on with a new picture: what was said is reused, and the answer equals one from scratch (E16)."""
    parts = [{"type": "image", "image": checkpoints.picture(3)}, {"type": "text", "text": LONG}]
    turn = [{"role": "user", "content": parts}]
    more = [*turn, {"role": "assistant", "content": "A cat."}]
    more.append(
        {"role": "user", "content": [{"type": "text", "text": "And"}, {**parts[0], "image": checkpoints.picture(4)}]}
    )
    with open_prefiller(family) as warm:
        warm.prefill(turn)
        result, expected = warm.prefill(more), cold(family).prefill(more)
        same(result, expected)
        assert result.reuse.tokens > BLOCK
        assert result.generate(8) == expected.generate(8)


def test_an_id_names_and_nothing_more(smol):
    """Requests that call themselves the same, with other pictures or words, share nothing by it (E7)."""
    for picture, text in ((1, "what?"), (2, "what?"), (2, "where?")):
        request = Request(prompt=text, images=[checkpoints.picture(picture)], id="mine")
        same(smol.prefill(request), cold("smolvlm").prefill(request))


def test_the_last_pixel_counts():
    """Pictures that differ in their last pixel alone are different ones (E5)."""
    first = checkpoints.picture(1, (200, 200))
    second = first.copy()
    second.putpixel((199, 199), tuple(255 - value for value in first.getpixel((199, 199))))
    with open_prefiller("smolvlm") as warm:
        warm.prefill("what?", images=[first])
        assert warm.prefill("what?", images=[second]).reuse.pictures == 0


def test_an_emitted_cache_can_be_copied(smol):
    """No gradient hangs on it: `copy.deepcopy` works, with gradients on or off (E18)."""
    cache = smol.prefill(LONG, images=[checkpoints.picture(1)]).cache
    twin = copy.deepcopy(cache)
    for layer, other in zip(cache.layers, twin.layers, strict=True):
        assert not layer.keys.requires_grad
        assert torch.equal(layer.keys, other.keys)
        assert layer.keys.data_ptr() != other.keys.data_ptr()


def test_what_a_user_writes_into_a_result_reaches_no_other():
    """Positions, tokens and logits of the same prompt, looked up later or prefilled again from one `Prepared`."""
    with open_prefiller("smolvlm") as prefiller:
        prepared = prefiller.intake.prepare(Request(prompt="what is it", images=[checkpoints.picture(1)]))
        first = prefiller._engine.start(prepared).result()
        kept = first.token_ids.clone(), first.positions.clone(), first.next_token_logits.clone()
        for tensor in (first.token_ids, first.positions, first.next_token_logits):
            tensor.zero_()
        again = prefiller._engine.start(prepared).result()
        assert again.reuse.why == "the whole prompt was prefilled before"
        for got, wanted in zip((again.token_ids, again.positions, again.next_token_logits), kept, strict=True):
            assert torch.equal(got, wanted)
