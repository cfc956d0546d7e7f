"""What holds for every request: bodies, headers, hosts, keys, the shape of errors."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import LiveServer, running_server, wait_for
from wire import CHAT, COMPLETIONS, HELLO, answer_of, chat, complete, error_of, events_of

from octavo.api import error_handlers
from octavo.api.auth import Client, prefix_salt
from octavo.api.json_body import parse_json
from octavo.core.config import ServerConfig
from octavo.core.errors import (
    ConfigError,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    UnsupportedParameter,
)
from octavo.core.limits import MAX_BODY_BYTES

JSON = {"content-type": "application/json"}


def raw_exchange(server: LiveServer, request: bytes) -> bytes:
    """What the server answers to these bytes, until it closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(request)
        answer = b""
        while part := sock.recv(65536):
            answer += part
    return answer


# bodies


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"prompt": "\xff"}', "not UTF-8: bad byte at offset 12"),
        (b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "x"}', "not valid JSON"),
        ('{"prompt": "x"}'.encode("utf-16"), "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN"),
        (b'{"prompt": "x", "temperature": -Infinity}', "Infinity"),
        (b'{"prompt": "x", "temperature": 1e999}', "too large"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"prompt": "x", "prompt": "y"}', "'prompt' twice"),
        (b'{"prompt": "x", "metadata": {"a": 1, "a": 2}}', "'a' twice"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"prompt": "x", "stop": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "nested too deeply"),
    ],
)
def test_a_broken_body_is_a_400_that_says_what_is_broken(server: LiveServer, body: bytes, says: str) -> None:
    error = error_of(server.http.post(COMPLETIONS, content=body, headers=JSON), 400)
    assert says in error["message"]


def test_a_deep_value_within_the_parsers_limit_is_no_trouble_either(server: LiveServer) -> None:
    deep = json.loads("[" * 400 + "]" * 400)
    for name in ("stop", "prompt", "tools", "messages", "logit_bias", "zzz", "chat_template_kwargs"):
        error_of(complete(server.http, **{name: deep} if name != "prompt" else {"prompt": deep}), 400)
        error_of(chat(server.http, **{name: deep}), 400)


def test_a_whole_surrogate_pair_is_a_character(server: LiveServer) -> None:
    body = b'{"prompt": "\\ud83d\\ude00", "echo": true, "max_tokens": 0}'
    answer = answer_of(server.http.post(COMPLETIONS, content=body, headers=JSON))
    assert answer["choices"][0]["text"] == "\U0001f600"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_value_of_any_field_makes_a_500(server: LiveServer, data: st.DataObject) -> None:
    from octavo.api.schemas_chat import ChatRequest
    from octavo.api.schemas_completions import CompletionRequest

    model, path = data.draw(st.sampled_from([(ChatRequest, CHAT), (CompletionRequest, COMPLETIONS)]))
    names = st.sampled_from(sorted(set(model.model_fields) - {"model"}))
    body = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    body |= data.draw(st.dictionaries(names, json_values, min_size=1, max_size=3))
    response = server.http.post(path, json=body)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error_of(response, 400)


@given(st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_any_bytes_parse_or_are_an_invalid_request(body: bytes) -> None:
    try:
        parsed = parse_json(body)
    except InvalidRequest:
        return
    assert parsed == json.loads(body)
    json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_body_that_a_web_page_may_send_unasked_is_refused(server: LiveServer, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = server.http.post(path, content=json.dumps({"prompt": "x"}), headers=headers)
    assert "application/json" in error_of(response, 415)["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"])
def test_json_media_types_are_accepted(server: LiveServer, kind: str) -> None:
    answer_of(server.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": kind}))


def test_a_body_over_the_limit_is_refused_in_the_usual_shape(server: LiveServer) -> None:
    body = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'

    def pieces() -> Iterator[bytes]:  # without a length: sent chunked
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    assert error_of(server.http.post(COMPLETIONS, content=body, headers=JSON), 413)["code"] == "request_too_large"
    assert error_of(server.http.post(COMPLETIONS, content=pieces(), headers=JSON), 413)["code"] == "request_too_large"
    answer_of(complete(server.http))  # the next request is fine


def test_a_body_of_exactly_the_limit_is_read(server: LiveServer) -> None:
    head, tail = b'{"prompt": "', b'"}'
    body = head + b"x" * (MAX_BODY_BYTES - len(head) - len(tail)) + tail
    error = error_of(server.http.post(COMPLETIONS, content=body, headers=JSON), 400)
    assert error["code"] == "context_length_exceeded"


def test_a_huge_declared_length_is_refused_before_any_of_it_is_sent(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(error_handlers, "LINGER_S", 0.1)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = raw_exchange(server, head.encode() + b"Content-Length: 99999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in answer
    waits = raw_exchange(server, head.encode() + b"Content-Length: 9999999\r\nExpect: 100-continue\r\n\r\n")
    assert waits.startswith(b"HTTP/1.1 413 ")  # and never "100 Continue"


# the shape of errors


def test_unknown_routes_and_methods_have_the_usual_shape(server: LiveServer) -> None:
    assert error_of(server.http.get("/v1/nothing"), 404)["code"] == "not_found"
    response = server.http.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_an_unknown_model_is_a_404_that_names_the_served_one(server: LiveServer) -> None:
    for response in (chat(server.http, model="gpt-9"), server.http.get("/v1/models/gpt-9")):
        error = error_of(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'fake'" in error["message"]
    answer_of(chat(server.http, model="fake"))


def test_models_are_listed_with_their_context_length(server: LiveServer) -> None:
    body = answer_of(server.http.get("/v1/models"))
    assert body["object"] == "list"
    assert body["data"] == [answer_of(server.http.get("/v1/models/fake"))]
    assert body["data"][0] | {"created": 0} == {
        "id": "fake", "object": "model", "created": 0, "owned_by": "octavo", "max_model_len": 512,
    }  # fmt: skip


def test_a_full_queue_is_a_429_with_a_whole_number_of_seconds(server: LiveServer) -> None:
    server.engine.queue_full = True
    for stream in (False, True):
        response = chat(server.http, stream=stream)
        assert error_of(response, 429)["code"] == "queue_full"
        assert response.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("x", param="p"), 400, None),
        (PromptTooLong("x"), 400, "context_length_exceeded"),
        (UnsupportedParameter("x"), 400, "unsupported_parameter"),
        (ModelNotFound("x"), 404, "model_not_found"),
        (QueueFull("x"), 429, "queue_full"),
        (EngineUnavailable("x"), 503, "engine_unavailable"),
        (RequestFailed("x"), 500, "request_failed"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
def test_every_error_has_its_status(error: Exception, status: int, code: str | None) -> None:
    wire = error_handlers.describe(error)
    assert (wire.status, wire.code) == (status, code)
    assert ("retry-after" in wire.headers) == (status in (429, 503))
    assert "secret" not in error_handlers.error_json(error)


def test_a_failed_request_is_a_500_or_an_event_before_done(server: LiveServer) -> None:
    server.engine.fail_after = 3
    error = error_of(chat(server.http), 500)
    assert error["code"] == "request_failed"
    assert "not finite" in error["message"]
    events = events_of(chat(server.http, stream=True))
    assert events[-1]["error"] == error
    assert [e["choices"][0]["delta"].get("content") for e in events[:-1]] == ["", "G", "r"]
    assert events_of(complete(server.http, ["a", "b"], stream=True))[-1]["error"]["code"] == "request_failed"


def test_a_bug_is_a_500_without_details(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    engine_submit = server.engine.submit

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("secret")

    server.engine.submit = broken  # type: ignore[method-assign]
    try:
        response = chat(server.http)
    finally:
        server.engine.submit = engine_submit  # type: ignore[method-assign]
    assert error_of(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"]
    assert response.headers["connection"] == "close"  # as uvicorn does after a bug
    assert wait_for(lambda: "secret" in caplog.text)  # for whoever runs the server


# headers


def test_headers_without_end_are_refused_before_they_fill_memory(server: LiveServer) -> None:
    """16 MB of them: a few fit into socket buffers."""
    padding = b"x-padding: " + 16_000_000 * b"a"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(f"GET /health HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\n".encode())
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            sock.sendall(padding)
    assert server.http.get("/health").status_code == 200


def test_a_sane_request_id_is_echoed_and_any_other_replaced(server: LiveServer) -> None:
    def id_for(given: str | None, path: str = "/health") -> str:
        headers = {} if given is None else {b"x-request-id": given.encode()}
        response = server.http.get(path, headers=headers)
        assert len(response.headers.get_list("x-request-id")) == 1
        return response.headers["x-request-id"]

    assert id_for("abc-1.2_3:x") == "abc-1.2_3:x"
    assert id_for("abc", "/v1/nothing") == "abc"
    assert id_for(None) != id_for(None)
    for odd in ("x" * 129, "a b", "é", ""):
        assert id_for(odd).startswith("req-")
    assert chat(server.http, stream=True).headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.8.8:99", "[::1]:8000", "LOCALHOST:1"])
def test_this_machines_own_names_are_answered(server: LiveServer, host: str) -> None:
    assert server.http.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1"])
def test_a_loopback_server_ignores_names_that_a_web_page_could_rebind(server: LiveServer, host: str) -> None:
    for path in ("/health", "/v1/models", "/v1/nothing"):
        assert error_of(server.http.get(path, headers={"host": host}), 421)["code"] == "wrong_host"


def test_further_hosts_can_be_allowed_and_public_binds_do_not_check(start_server: Callable[..., Any]) -> None:
    with start_server(allowed_host=("box.lan",)) as server:
        server.wait_until_ready()
        assert server.http.get("/health", headers={"host": "box.lan:8000"}).status_code == 200
        assert server.http.get("/health", headers={"host": "other.lan"}).status_code == 421
    with start_server(host="0.0.0.0") as server:
        server.wait_until_ready()
        assert server.http.get("/health", headers={"host": "other.lan"}).status_code == 200


def test_cors_is_off_until_configured(server: LiveServer, start_server: Callable[..., Any]) -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    response = server.http.options(CHAT, headers=preflight)
    error_of(response, 405)
    assert "access-control-allow-origin" not in response.headers
    with start_server(cors_origin=("https://a.example",), api_key=("k",)) as other:
        other.wait_until_ready()
        response = other.http.options(CHAT, headers=preflight)  # a preflight has no key
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        evil = other.http.options(CHAT, headers=preflight | {"origin": "https://b.example"})
        assert "access-control-allow-origin" not in evil.headers


# keys


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[LiveServer]:
    with running_server(api_key=("key-a", "key-b"), admin_key=("root",)) as server:
        server.wait_until_ready()
        yield server


@pytest.mark.parametrize("given", [None, "key-a", "Basic key-a", "Bearer", "Bearer key", "Bearer key-aa"])
def test_a_missing_or_wrong_key_is_a_401(keyed_server: LiveServer, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given}
    for path in ("/v1/models", "/v1/nothing"):
        response = keyed_server.http.get(path, headers=headers)
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert keyed_server.http.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize("given", ["Bearer key-a", "bearer key-b", "Bearer  root"])
def test_any_of_the_keys_opens(keyed_server: LiveServer, given: str) -> None:
    assert keyed_server.http.get("/v1/models", headers={"authorization": given}).status_code == 200


def submitted_as(server: LiveServer, key: str, **fields: Any) -> tuple[str, bytes]:
    http = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"})
    with http:
        answer_of(complete(http, **fields))
    request = server.engine.requests[-1]
    return request.client, request.cache_salt


def test_keys_separate_clients_and_their_prefix_caches(keyed_server: LiveServer) -> None:
    a, b = submitted_as(keyed_server, "key-a"), submitted_as(keyed_server, "key-b")
    assert a == submitted_as(keyed_server, "key-a")
    assert a[0] != b[0]
    assert "key-a" not in a[0]
    salts = {a[1], b[1]} | {submitted_as(keyed_server, key, cache_salt="s")[1] for key in ("key-a", "key-b")}
    assert len(salts) == 4  # a salt adds to the client's, never replaces it
    assert b"" not in salts


@pytest.mark.parametrize("field", ["api_key", "admin_key"])
@pytest.mark.parametrize("key", ["", " ", " key", "key\n"])
def test_a_key_that_no_client_could_send_is_refused_at_the_start(field: str, key: str) -> None:
    """An empty one is mostly a variable of the shell that is not set."""
    with pytest.raises(ConfigError, match=f"{field} is empty"):
        ServerConfig(**{field: ("fine", key)})


@given(
    st.lists(st.tuples(st.text("ab1:", max_size=3), st.text("ab1:", min_size=1, max_size=3)), min_size=2, unique=True)
)
def test_no_two_pairs_of_client_and_salt_share_a_prefix_cache(pairs: list[tuple[str, str]]) -> None:
    salts = {prefix_salt(Client(id=owner, is_admin=False), asked, share=False) for owner, asked in pairs}
    assert len(salts) == len(pairs)


def test_a_salt_that_spells_another_clients_id_opens_nothing(start_server: Callable[..., Any]) -> None:
    """With admin keys alone, anybody may call; who knows the admin's id must not reach what the admin has cached."""
    with start_server(admin_key=("root",)) as server:
        server.wait_until_ready()
        admin, salt = submitted_as(server, "root", cache_salt="s")
        for guess in (admin, f"{admin}s", f"{len(admin)}:{admin}s", f"16:{admin}s"):
            stranger = submitted_as(server, "nobody", cache_salt=guess)
            assert stranger[0] == ""
            assert stranger[1] != salt
            assert stranger[1] != submitted_as(server, "root")[1]


def test_shared_prefix_caches_keep_only_the_requested_salt(start_server: Callable[..., Any]) -> None:
    with start_server(FakeEngine(share_prefix_cache=True), api_key=("key-a", "key-b")) as server:
        server.wait_until_ready()
        assert submitted_as(server, "key-a")[1] == submitted_as(server, "key-b")[1] == b""
        assert (
            submitted_as(server, "key-a", cache_salt="s")[1] == submitted_as(server, "key-b", cache_salt="s")[1] != b""
        )


def test_without_keys_whatever_key_a_client_sends_is_fine(server: LiveServer) -> None:
    assert submitted_as(server, "anything") == ("", b"")


@pytest.mark.parametrize("padding", [b"", b"[]," * 500 + b"0"], ids=["small", "large"])
def test_a_body_that_begins_with_a_byte_order_mark_is_read(server: LiveServer, padding: bytes) -> None:
    body = b'\xef\xbb\xbf{"prompt": "x", "metadata": [' + padding + b"]}"
    assert answer_of(server.http.post(COMPLETIONS, content=body, headers=JSON))


def test_a_large_body_has_the_same_answer_as_a_small_one(server: LiveServer) -> None:
    """Thousands of parts leave the event loop; what comes of them does not change."""
    parts = [{"type": "text", "text": "x"}] * 200
    chat_body, ids = {"messages": [{"role": "user", "content": parts}]}, [1] * 400
    answer_of(server.http.post(CHAT, json=chat_body | {"metadata": [[]] * 1000}))
    assert server.engine.chats[-1][0][0]["content"] == parts
    answer_of(server.http.post(COMPLETIONS, json={"prompt": ids, "metadata": [[]] * 1000}))
    assert server.engine.requests[-1].prompt_token_ids == tuple(ids)


@pytest.mark.parametrize(
    ("path", "fields", "code"),
    [
        (COMPLETIONS, {"prompt": [1] * 200_000}, "context_length_exceeded"),
        (COMPLETIONS, {"prompt": [[1], [1] * 200_000]}, "context_length_exceeded"),
        (COMPLETIONS, {"prompt": ["x"] * 5000}, None),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": [1] * 5000}, None),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(5000)}}, None),
        (COMPLETIONS, {"prompt": "x", "stop": ["x"] * 5000}, None),
        (COMPLETIONS, {"prompt": "x", "model": "x" * 5000}, None),
        (COMPLETIONS, {"prompt": "x", "temperature": {str(i): 1 for i in range(5000)}}, None),
        (COMPLETIONS, {"prompt": "x"} | {str(i): 1 for i in range(5000)}, None),
        (CHAT, {"messages": [{"role": "user", "content": "x"} | {str(i): 1 for i in range(5000)}]}, None),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600_000}] * 2}, "context_length_exceeded"),
    ],
)
def test_lengths_are_looked_at_before_contents(
    server: LiveServer, path: str, fields: dict[str, Any], code: str | None
) -> None:
    error = error_of(server.http.post(path, json=fields), 400)
    assert error["code"] == code
    assert len(error["message"]) < 400
