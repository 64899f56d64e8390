"""The judge's endpoint as an adversary: it echoes the key, never ends, lies about what it cost."""

from __future__ import annotations

import asyncio
import base64
import html
import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from aiohttp import web

from holdfast.data.retrieve.budget import Budget, CapReached, most_tokens
from holdfast.data.retrieve.endpoint import EndpointConfig
from holdfast.data.retrieve.judge import judge_by_endpoint
from holdfast.data.retrieve.manifest import RetrievalFolder
from holdfast.data.retrieve.question import Question
from holdfast.data.retrieve.secret import HIDDEN, ApiKey
from holdfast.errors import Exit, HoldfastError, UserError
from tests.data.retrieve.web import chat, config_of, verdict_text
from tests.processes import python

QUESTION = Question("strict", "fog")
KEY = "sk-live/4f9+Qz&7'x\"b<%41~SECRETtail"


def forms_of(key: str) -> dict[str, str]:
    """The ways in which servers, proxies and loggers write a key, made by the standard library."""
    bearer = f"Bearer {key}"
    return {
        "plain": key,
        "upper": key.upper(),
        "json": json.dumps(key)[1:-1],
        "html": html.escape(key),
        "url": quote(key),
        "url, all": quote(key, safe=""),
        "form": quote_plus(bearer),
        "hex": key.encode().hex(),
        "base64": base64.b64encode(key.encode()).decode(),
        "base64 of the header": base64.b64encode(bearer.encode()).decode(),
        "base64 of user and key": base64.b64encode(f"user:{key}".encode()).decode(),
        "base64 for addresses": base64.urlsafe_b64encode(f"me:{key}\n".encode()).decode(),
    }


def assert_hidden(text: str) -> None:
    """No form of the key is in a text, nor a telling part of one."""
    lowered = text.lower()
    for name, form in forms_of(KEY).items():
        # Base64 mixes the first and last letters of a key with its neighbours: some bits stay at either end.
        core = form.rstrip("=")[3:-3] if name.startswith("base64") else form
        for start in range(len(core) - 10):
            assert core[start : start + 11].lower() not in lowered, f"{name}: {core[start : start + 11]}"


def everything_in(folder: Path) -> str:
    return "\n".join(path.read_bytes().decode("utf-8", "replace") for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("key", [KEY, "EMPTY", "abcd", "a.b.c.d.e", "x" * 200])
def test_a_key_is_hidden_in_every_form(key: str) -> None:
    hide = ApiKey(key).hide
    for name, form in forms_of(key).items():
        if name.startswith("base64") and len(key) < 8:
            continue  # too short to be told from other letters
        assert hide(f"before {form} after {form}").count(HIDDEN) == 2, name
        assert key not in hide(f"<{form}>")
    assert hide("an honest sentence, and nothing else") == "an honest sentence, and nothing else"
    assert key not in repr(ApiKey(key))


def test_a_placeholder_is_hidden_where_it_is_a_key_and_nowhere_else() -> None:
    assert ApiKey("x").hide("Bearer x is no key; next exit") == "*** is no key; next exit"
    assert ApiKey("").hide("nothing to hide") == "nothing to hide"


def echo(request: web.Request) -> dict[str, str]:
    """The Authorization header that came, in every form, as one text."""
    given = request.headers["Authorization"]
    forms = forms_of(given.removeprefix("Bearer "))
    return {"given": given, "all": " | ".join(forms.values())}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 500, 503, 302, 200])
def test_an_endpoint_that_echoes_the_key_does_not_get_it_printed(
    searched, serve, monkeypatch, tried: Callable[..., None], status: int
) -> None:
    """In the body, the reason beside the status, the headers: whatever the status is, whatever is made of it."""

    async def handle(request: web.Request) -> web.StreamResponse:
        echoed = echo(request)
        headers = {"X-Echo": echoed["given"], "Retry-After": echoed["given"], "WWW-Authenticate": echoed["given"]}
        reason = f"no use for {echoed['given']}"
        return web.Response(status=status, reason=reason, headers=headers, text=f"wrong key: {echoed['all']}")

    monkeypatch.setenv("MY_KEY", KEY)
    out = searched(["fog"])
    config = config_of(serve(handle), key_variable="MY_KEY", attempts=2)
    with pytest.raises(HoldfastError) as problem:
        judge_by_endpoint(out, QUESTION, config)
    tried("bad inputs")
    assert_hidden(problem.value.text())
    assert_hidden(everything_in(out))
    if isinstance(problem.value, UserError):
        assert HIDDEN in problem.value.found


@pytest.mark.parametrize("before", [0, 250, 270, 290, 299])
def test_a_message_that_is_cut_does_not_keep_half_a_key(searched, serve, monkeypatch, before: int) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=401, text="-" * before + request.headers["Authorization"].removeprefix("Bearer "))

    monkeypatch.setenv("MY_KEY", KEY)
    with pytest.raises(UserError) as problem:
        judge_by_endpoint(searched(["fog"]), QUESTION, config_of(serve(handle), key_variable="MY_KEY"))
    assert KEY[:3] not in problem.value.text()


@pytest.mark.parametrize("before", [0, 200, 270, 290])
def test_a_reason_that_holds_the_key_is_kept_without_it(searched, serve, monkeypatch, before: int) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        reason = "-" * before + echo(request)["all"]
        return chat(verdict_text(await request.json(), "yes", reason))

    monkeypatch.setenv("MY_KEY", KEY)
    out = searched(["fog"])
    assert judge_by_endpoint(out, QUESTION, config_of(serve(handle), key_variable="MY_KEY"))["counts"]["kept"] == 1
    assert_hidden(everything_in(out))
    assert HIDDEN in RetrievalFolder(out).answers.read_text()


def test_the_command_line_prints_no_key(searched, serve, tried: Callable[..., None]) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=401, reason=request.headers["Authorization"], text=f"bad key {echo(request)['all']}")

    out, server = searched(["fog"]), serve(handle)
    words = ["retrieve", "judge", str(out), "--judge-url", f"{server.url}/v1", "--judge-model", "m"]
    done = python("-m", "holdfast", *words, env={**os.environ, "OPENAI_API_KEY": f"{KEY}\n"})
    tried("bad inputs")
    assert done.returncode == Exit.USER, done.stderr
    assert "Traceback" not in done.stderr
    assert HIDDEN in done.stderr
    assert_hidden(done.stdout + done.stderr)


@pytest.mark.parametrize("key", ["sk-secret\nX-Evil: 1", "sk-sécret-secret", "sk-secret\x00secret"])
def test_a_key_that_cannot_be_sent_is_said_without_it(searched, serve, monkeypatch, tried, key: str) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return chat(verdict_text(await request.json(), "yes"))

    tried("bad inputs")
    monkeypatch.setitem(os.environ._data, b"MY_KEY", os.fsencode(key))  # also what a shell would not let through
    server = serve(handle)
    with pytest.raises(UserError, match="the key in MY_KEY cannot be sent") as problem:
        judge_by_endpoint(searched(["fog"]), QUESTION, config_of(server, key_variable="MY_KEY"))
    assert "cret" not in problem.value.text()
    assert not server.hits


def worst(caption: str) -> int:
    """Tokens that a question may cost at most: one a byte, 64 for the endpoint's template, 400 for the answer."""
    return 464 + sum(len(message["content"].encode()) for message in QUESTION.messages(caption))


def counting(usage: object, spent: list[int]) -> Callable[[web.Request], object]:
    """A judge that says yes, and notes what each answer cost."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if isinstance(usage, tuple):
            spent.append(sum(usage))
            return chat(verdict_text(body, "yes"), usage)
        text = verdict_text(body, "yes")
        spent.append(64 + sum(len(message["content"].encode()) for message in body["messages"]) + len(text))
        return web.json_response({"choices": [{"message": {"content": text}}], "usage": usage})

    return handle


def test_the_cap_on_requests_is_kept_and_the_next_run_goes_on(searched, serve) -> None:
    server = serve(counting((10, 5), []))
    out = searched([f"fog {i}" for i in range(10)])
    config = config_of(server, max_requests=4)
    for asked, judged in ((4, 4), (8, 8)):
        with pytest.raises(HoldfastError, match="stopped at --max-requests") as stop:
            judge_by_endpoint(out, QUESTION, config)
        assert stop.value.exit_code == Exit.FAILED
        assert f"{judged} captions are judged, {10 - judged} are left" in stop.value.message
        assert "run the same command again" in stop.value.do
        assert "4 requests" in stop.value.found
        assert sum(server.hits.values()) == asked
        assert RetrievalFolder(out).step("judge") is None
    assert judge_by_endpoint(out, QUESTION, config)["counts"]["kept"] == 10
    assert sum(server.hits.values()) == 10, "what was judged before is kept"


def test_a_cap_that_is_just_enough_stops_nothing(searched, serve) -> None:
    captions = [f"fog {i}" for i in range(6)]
    server = serve(counting((10, 5), []))
    config = config_of(server, max_requests=6, max_tokens=5 * 15 + worst("fog 0"))
    assert judge_by_endpoint(searched(captions), QUESTION, config)["counts"]["kept"] == 6


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("usage", [(300, 100), (3, 2), None])
def test_the_cap_on_tokens_is_never_exceeded_and_used_to_the_end(
    searched, serve, usage: tuple[int, int] | None, concurrency: int
) -> None:
    """With the endpoint's own counts, or with a token a byte where it reports none."""
    spent: list[int] = []
    server = serve(counting(usage, spent))
    captions = [f"fog number {i:02d} {'x' * (i % 7)}" for i in range(40)]
    out, cap = searched(captions), 4000
    at_worst = max(worst(caption) for caption in captions)
    before, reasons = 0, list[str]()
    for _ in range(100):
        try:
            judge_by_endpoint(out, QUESTION, config_of(server, max_tokens=cap, concurrency=concurrency))
            break
        except HoldfastError as stop:
            reasons.append(stop.message)
        used = sum(spent[before:])
        assert cap - at_worst < used <= cap, "no request that fits is held back"
        before = len(spent)
    assert all("stopped at --max-tokens" in reason for reason in reasons)
    assert RetrievalFolder(out).need("judge")["counts"]["kept"] == 40
    assert len(spent) == 40, "nothing is asked twice"


@pytest.mark.parametrize(
    "usage",
    [
        *({"prompt_tokens": -(10**9), "completion_tokens": 5}, {"prompt_tokens": "many", "completion_tokens": 1}),
        *({"prompt_tokens": 1e308, "completion_tokens": 1}, {"prompt_tokens": True, "completion_tokens": True}),
        *({"prompt_tokens": 10**30, "completion_tokens": 0}, {}, [], "free", {"total_tokens": 1}),
    ],
)
def test_an_endpoint_that_lies_about_tokens_gains_nothing(searched, serve, tried, usage: object) -> None:
    tried("bad inputs")
    spent: list[int] = []
    server = serve(counting(usage, spent))
    out = searched([f"fog {i}" for i in range(10)])
    with pytest.raises(HoldfastError, match="stopped at --max-tokens"):
        judge_by_endpoint(out, QUESTION, config_of(server, max_tokens=4000, concurrency=1))
    assert sum(spent) <= 4000
    assert 0 < len(spent) < 10


def test_infinite_tokens_are_no_count(searched, serve, tried) -> None:
    tried("bad inputs")

    async def handle(request: web.Request) -> web.StreamResponse:
        text = json.dumps(verdict_text(await request.json(), "yes"))
        usage = '{"prompt_tokens": Infinity, "completion_tokens": NaN}'
        return web.Response(text=f'{{"choices": [{{"message": {{"content": {text}}}}}], "usage": {usage}}}')

    counts = judge_by_endpoint(searched(["fog"]), QUESTION, config_of(serve(handle)))["counts"]
    assert (counts["kept"], counts["tokens_in"]) == (1, 0)


def test_requests_that_fail_count_and_cost_what_they_may_have_cost(searched, serve) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500)

    server = serve(handle)
    with pytest.raises(HoldfastError, match="stopped at --max-requests: 0 captions are judged, 1 are left") as stop:
        judge_by_endpoint(searched(["fog"]), QUESTION, config_of(server, max_requests=3))
    assert sum(server.hits.values()) == 3
    assert f"{3 * worst('fog'):,} tokens" in stop.value.found


def test_requests_that_are_turned_away_cost_no_tokens(searched, serve) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429)

    with pytest.raises(HoldfastError, match="stopped at --max-requests") as stop:
        judge_by_endpoint(searched(["fog"]), QUESTION, config_of(serve(handle), max_requests=3))
    assert "3 requests and at most 0 tokens" in stop.value.found


def test_a_cap_too_small_for_one_question_is_said_before_any_is_put(searched, serve) -> None:
    server = serve(counting((10, 5), []))
    with pytest.raises(UserError, match="--max-tokens 100 does not allow a single question") as problem:
        judge_by_endpoint(searched(["fog"]), QUESTION, config_of(server, max_tokens=100))
    assert f"{worst('fog'):,} or more" in problem.value.expected
    assert not server.hits
    for wrong in ({"max_tokens": 0}, {"max_requests": 0}):
        with pytest.raises(UserError, match="must be above 0"):
            config_of(server, **wrong)


def test_captions_beyond_a_cap_are_not_dropped_as_unanswered(searched, serve) -> None:
    server = serve(counting((10, 5), []))
    out = searched([f"fog {i}" for i in range(3)])
    with pytest.raises(HoldfastError, match="stopped at --max-requests"):
        judge_by_endpoint(out, QUESTION, config_of(server, max_requests=2), drop_unanswered=True)
    assert RetrievalFolder(out).step("judge") is None


def test_the_caps_on_the_command_line(searched, serve) -> None:
    server = serve(counting((10, 5), []))
    out = searched([f"fog {i}" for i in range(3)])

    def judge(*more: str) -> subprocess.CompletedProcess[str]:
        words = ["retrieve", "judge", str(out), "--judge-url", f"{server.url}/v1", "--judge-model", "m", *more]
        words += ["--judge-timeout", "300"]
        return python("-m", "holdfast", *words)

    stopped = judge("--max-requests", "2")
    assert stopped.returncode == Exit.FAILED
    assert "2 captions are judged, 1 are left" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert "holdfast retrieve fetch" in judge("--max-requests", "2").stdout
    for option, default in (("--max-requests", "100000"), ("--max-tokens", "50000000")):
        shown = judge("--help").stdout
        assert option in shown
        assert default in shown


def test_a_budget_is_kept_in_any_order_of_events() -> None:
    """Requests of random size and length of life: the cap holds at every moment, and none waits for ever."""
    for seed in range(50):
        draw = random.Random(seed)
        budget = Budget(draw.randint(1, 60), draw.randint(100, 3000))
        refused: list[str] = []

        async def request(draw: random.Random, budget: Budget, refused: list[str]) -> None:
            reserved = draw.randint(1, 120)
            try:
                await budget.reserve(reserved)
            except CapReached as cap:
                refused.append(cap.option)
                return
            for _ in range(draw.randint(0, 5)):
                await asyncio.sleep(0)
            budget.settle(reserved, draw.randint(0, reserved))
            assert budget.tokens <= budget.max_tokens
            assert budget.requests <= budget.max_requests

        async def all_of_them(draw: random.Random, budget: Budget, refused: list[str]) -> None:
            await asyncio.gather(*(request(draw, budget, refused) for _ in range(50)))

        asyncio.run(all_of_them(draw, budget, refused))
        assert budget.requests + len(refused) == 50


def test_a_token_is_a_byte_at_least() -> None:
    assert most_tokens("fog") == 3
    assert most_tokens("雾") == 3


def failing(handler, searched, serve, **changes: object) -> str:
    """What is said when no answer can be used."""
    config = config_of(serve(handler), attempts=2, **changes)
    with pytest.raises(HoldfastError, match="1 captions got no answer") as problem:
        judge_by_endpoint(searched(["fog"]), QUESTION, config)
    return problem.value.found


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"choices": ' * 50_000,
        b'{"choices": [{"message": ' + b"[" * 400_000 + b"]" * 400_000 + b"}]}",
    ],
)
def test_an_answer_that_is_nested_too_deeply_is_no_answer(searched, serve, tried, body: bytes) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    tried("bad inputs")
    assert failing(handle, searched, serve) in ("an answer that is nested too deeply: 1", "not a chat completion: 1")


@pytest.mark.parametrize("text", ["{" * 900_000, '{"a":' * 150_000, "[" * 900_000, "true " * 180_000])
@pytest.mark.parametrize("question", [QUESTION, Question("paper", "fog")])
def test_a_text_that_is_nested_too_deeply_or_too_long_is_no_verdict(text: str, question: Question, tried) -> None:
    tried("bad inputs")
    assert question.read(text, "fog") is None


def test_an_endless_answer_is_given_up(searched, serve, tried) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65_536)

    tried("bad inputs")
    assert failing(handle, searched, serve) == "an endless answer: 1"


def test_a_compressed_answer_is_not_unpacked(searched, serve, tried) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=b"\x1f\x8b" + b"\0" * 1000, headers={"Content-Encoding": "gzip"})

    tried("bad inputs")
    assert failing(handle, searched, serve) == "a compressed answer: 1"


@pytest.mark.parametrize("kind", ["compressed", "endless"])
def test_a_refusal_is_said_whatever_its_body_is(searched, serve, tried, kind: str) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        if kind == "compressed":
            return web.Response(status=401, body=b"\x1f\x8b\x1b[31m", headers={"Content-Encoding": "gzip"})
        response = web.StreamResponse(status=401)
        await response.prepare(request)
        while True:
            await response.write(b"no \x1b[31m" * 1000)

    tried("bad inputs")
    server = serve(handle)
    with pytest.raises(UserError, match="status 401") as problem:
        judge_by_endpoint(searched(["fog"]), QUESTION, config_of(server))
    assert server.hits.total() == 1
    assert len(problem.value.found) <= 300
    assert "\x1b" not in problem.value.text(), "nothing that steers a terminal"


@pytest.mark.parametrize(
    "url", ["ftp://a.test", "http://", "http://[::1", "http://]@é:80[@", "http:///v1", "a.test/v1"]
)
def test_an_address_that_is_none_is_said(url: str, tried) -> None:
    tried("bad inputs")
    with pytest.raises(UserError, match="--judge-url"):
        EndpointConfig(url, "m")


@pytest.mark.parametrize("wait", ["²", "1e999", "nan", "-5", "Wed, 21 Oct 2015 07:28:00 GMT", "", "9" * 5000, "0.0.1"])
def test_a_wait_that_is_no_number_is_passed_over(searched, serve, tried, monkeypatch, wait: str) -> None:
    from holdfast.data.retrieve import endpoint

    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": wait})

    tried("bad inputs")
    server = serve(handle)
    monkeypatch.setattr(endpoint.asyncio, "sleep", sleep)
    with pytest.raises(HoldfastError, match="got no answer"):
        judge_by_endpoint(searched(["fog"]), QUESTION, config_of(server, attempts=2))
    assert all(0 <= seconds <= 300 for seconds in waits)


def test_an_answer_that_comes_in_pieces_is_read_whole(searched, serve) -> None:
    """The pauses make it likely that the pieces are read one by one; however they are, the answer is the same."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        content = chat(verdict_text(body, "yes")).body
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(content), 16):
            await response.write(content[start : start + 16])
            await asyncio.sleep(0.02)
        return response

    server = serve(handle)
    assert judge_by_endpoint(searched(["fog"]), QUESTION, config_of(server))["counts"]["kept"] == 1
    assert sum(server.hits.values()) == 1


def corrupted(line: bytes) -> list[bytes]:
    """What can become of a line of the cache."""
    entry = json.loads(line)
    changes = [{"kept": "yes"}, {"kept": None}, {"reason": 7}, {"in": "3"}, {"in": -1}, {"out": True}, {"scope": 5}]
    changes += [{"caption": ["x"]}, {"caption": 3}, {"in": 10**12}]
    broken = [json.dumps(entry | change).encode() for change in changes]
    broken += [json.dumps({key: entry[key] for key in entry if key != name}).encode() for name in entry]
    broken += [b"garbage", b"\xff\xfe\x00", b"null", b"[]", b"[" * 100_000, b'{"a":' * 100_000, b"", line[:40]]
    return [*broken, line[:30] + line[:-1]]


def test_a_corrupt_line_of_the_cache_is_passed_over_and_judged_again(searched, serve, tried) -> None:
    server = serve(counting((10, 5), []))
    captions = [f"fog {i}" for i in range(4)]
    out = searched(captions)
    cache = RetrievalFolder(out).answers
    whole = judge_by_endpoint(out, QUESTION, config_of(server, concurrency=1))
    lines = cache.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    variants = corrupted(lines[1])
    for broken in variants:
        tried("bad inputs")
        cache.write_bytes(lines[0] + broken + b"\n" + b"".join(lines[2:]))
        server.hits.clear()
        notes: list[str] = []
        assert judge_by_endpoint(out, QUESTION, config_of(server), note=notes.append) == whole
        assert sum(server.hits.values()) == 1, broken[:80]
        assert len(notes) == 1
        assert notes[0].startswith(f"1 lines of {cache} cannot be read")
    assert len(variants) > 20


def test_a_cache_that_is_all_rubbish_is_judged_anew(searched, serve, tried) -> None:
    tried("bad inputs")
    server = serve(counting((10, 5), []))
    out = searched([f"fog {i}" for i in range(3)])
    cache = RetrievalFolder(out).answers
    cache.parent.mkdir()
    cache.write_bytes(random.Random(0).randbytes(10_000) + b"without an end of line")
    assert judge_by_endpoint(out, QUESTION, config_of(server))["counts"]["kept"] == 3
    judge_by_endpoint(out, QUESTION, config_of(server))
    assert sum(server.hits.values()) == 3, "what was appended behind the rubbish is read"


def test_two_folders_may_write_one_cache_at_once(searched, serve, tmp_path: Path) -> None:
    """Answers come alternately: each folder's next one only when the other's has been written."""
    server = serve(counting((10, 5), []))
    cache = tmp_path / "shared.jsonl"
    folders = [searched([f"fog {name} {i}" for i in range(30)], name) for name in ("a", "b")]

    async def both() -> None:
        judged = (
            asyncio.to_thread(judge_by_endpoint, out, QUESTION, config_of(server), cache=cache) for out in folders
        )
        await asyncio.gather(*judged)

    asyncio.run(both())
    assert len(cache.read_bytes().splitlines()) == 60
    server.hits.clear()
    for out in folders:
        judge_by_endpoint(out, QUESTION, config_of(server), cache=cache)
    assert not server.hits
