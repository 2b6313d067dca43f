"""Source specs: what they name, and what is refused."""

import pytest

from evalgate.errors import UsageError
from evalgate.specs import parse


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("demo", "embedded"),
        ("demo@int8", "embedded"),
        ("./model.gguf", "embedded"),
        ("ref.trace", "trace"),
        ("llama.cpp:m.gguf", "llama.cpp"),
        ("http://host:8000/v1#m", "endpoint"),
    ],
)
def test_kinds(spec, kind):
    assert parse(spec).kind == kind


@pytest.mark.parametrize("url", ["http://h:1/v1", "http://h:1/v1/", "http://h:1", "http://h:1/"])
def test_urls_are_roots(url):
    assert parse(f"{url}#name/with#hash").urls == ("http://h:1",)
    assert parse(f"{url}#name").model == "name"


def test_several_urls_of_one_source():
    found = parse("http://a/v1#m,https://b:2/x/v1#m,http://c")
    assert found.urls == ("http://a", "https://b:2/x", "http://c")
    assert found.model == "m"


@pytest.mark.parametrize(
    "spec",
    [
        "http://",
        "http://h:0/v1",
        "http://h:99999/v1",
        "http://user:secret@h/v1",
        "http://h/v1?key=1",
        "http://a#m,http://b#n",
        "http://a,http://a/v1",
        "http://a,demo",
        "llama.cpp:",
    ],
)
def test_refused(spec):
    with pytest.raises(UsageError) as caught:
        parse(spec)
    assert "secret" not in caught.value.message
