"""Cases of the manifest's JSON, its fields, later versions, and metrics that were added later."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from xxhash import xxh3_64_hexdigest as checksum

from .drafts import Case, Draft, Files, base, changed, cut, numbered, refused, sealed


def texts() -> Iterator[Case]:
    good: list[tuple[str, str, Callable[[bytes], bytes]]] = [
        ("blanks", "blanks between everything", lambda t: json.dumps(json.loads(t), indent=1).encode()),
        (
            "escapes",
            "every character escaped",
            lambda t: t.replace(b'"step"', b'"\\u0073tep"').replace(b'"v"', b'"\\u0076"'),
        ),
        ("order", "the fields in another order", lambda t: json.dumps(dict(reversed(json.loads(t).items()))).encode()),
        ("exponent", "a float with an exponent", lambda t: t.replace(b"1.5]", b"15E-1]")),
    ]
    for name, about, change in good:
        yield Case(f"text-{name}", about, changed(base, lambda d, c=change: setattr(d, "text", c)))
    pair = changed(base, lambda d: setattr(d, "text", lambda t: t.replace(b'"by hand"', b'"\\ud83d\\ude00"')))
    yield Case("text-pair", "a character as a pair of escapes", pair)
    bad: list[tuple[str, str, Callable[[bytes], bytes]]] = [
        ("bom", "a byte order mark", lambda t: b"\xef\xbb\xbf" + t),
        ("utf-16", "UTF-16", lambda t: t.decode().encode("utf-16-le")),
        ("encoding", "text that is not UTF-8", lambda t: t.replace(b"by hand", b"by \xff")),
        ("surrogate-bytes", "half of a pair as bytes", lambda t: t.replace(b"by hand", b"by \xed\xa0\x80")),
        ("surrogate", "the first half of a pair", lambda t: t.replace(b"by hand", b"by \\ud83d")),
        ("surrogate-second", "the second half of a pair", lambda t: t.replace(b"by hand", b"by \\ude00")),
        ("surrogate-deep", "half of a pair in the metadata", lambda t: t[:-1] + b',"metadata":{"a":["\\ud800x"]}}'),
        ("key-twice", "a field stands twice", lambda t: t[:-1] + b',"version":1}'),
        ("key-twice-deep", "a key of the metadata stands twice", lambda t: t[:-1] + b',"metadata":{"a":{"b":1,"b":1}}}'),
        ("key-twice-escaped", "a key stands twice, once escaped", lambda t: t[:-1] + b',"metadata":{"b":1,"\\u0062":1}}'),
        ("key-twice-unknown", "a key of an unknown field stands twice", lambda t: t[:-1] + b',"more":{"b":1,"b":2}}'),
        ("nan", "NaN", lambda t: t[:-1] + b',"metadata":NaN}'),
        ("infinity", "Infinity", lambda t: t[:-1] + b',"metadata":[-Infinity]}'),
        ("huge", "1e400", lambda t: t[:-1] + b',"metadata":1e400}'),
        ("minus-zero", "the integer -0", lambda t: t[:-1] + b',"metadata":[-0]}'),
        ("minus-zero-step", "the step -0", lambda t: t[:-1] + b',"step":-0}'),
        ("minus-zero-float", "the float -0", lambda t: t.replace(b"1.5]", b"-0]")),
        ("leading-zero", "an integer with a leading zero", lambda t: t[:-1] + b',"metadata":01}'),
        ("plus", "an integer with a plus", lambda t: t[:-1] + b',"metadata":+1}'),
        ("trailing-comma", "a comma at the end", lambda t: t[:-1] + b',"metadata":[1,]}'),
        ("comment", "a comment", lambda t: t[:-1] + b'/* no */}'),
        ("control", "a control character in text", lambda t: t[:-1] + b',"metadata":"a\nb"}'),
        ("escape", "an unknown escape", lambda t: t[:-1] + b',"metadata":"\\x41"}'),
        ("single-quotes", "single quotes", lambda t: t[:-1] + b",'metadata':1}"),
        ("two", "two objects", lambda t: t + b"{}"),
        ("list", "a list", lambda t: b"[1]"),
        ("empty", "an empty object", lambda t: b"{}"),
        ("cut", "cut off, and sealed", lambda t: t[:-20] + b"}"),
        ("deep", "lists nested 100,000 deep", lambda t: t[:-1] + b',"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        ("integer", "an integer of 5,000 digits", lambda t: t[:-1] + b',"metadata":' + b"9" * 5000 + b"}"),
    ]  # fmt: skip
    for name, about, change in bad:
        yield Case(f"bad-text-{name}", about, changed(base, lambda d, c=change: setattr(d, "text", c)), "unsupported")


def nest(depth: int) -> Any:
    found: Any = 1
    for n in range(depth):
        found = {"a": found} if n % 2 else [found]
    return found


def fields() -> Iterator[Case]:
    good: list[tuple[str, dict[str, Any]]] = [
        ("step", {"step": 0}), ("step-great", {"step": 2**53}), ("unknown", {"more": {"a": [1]}, "another": None}),
        ("metadata", {"metadata": {"a": [1, 2.5, "x", None, True, {}], "": -(2**63), "b": 2**64 - 1}}), ("metadata-null", {"metadata": None}), ("metadata-deep", {"metadata": nest(200)}), ("unknown-deep", {"more": nest(200)}), ("unknown-integer", {"more": [10**30]}),("created-z", {"created": "2026-11-22T12:00:00Z"}), ("created-offset", {"created": "1999-12-31T23:59:59.5-11:30"}),
        ("metadata-floats", {"metadata": {"a/~": ["inf", "nan"], "": "-inf", "b": "nan"}, "metadata_floats": ["/", "/a~1~0/1", "/a~1~0/0"]}),
        ("metadata-float", {"metadata": "nan:7ff8000000000001", "metadata_floats": [""]}), ("metadata-floats-none", {"metadata_floats": []}),
        ("software-empty", {"software": {}}), ("requires-empty", {"requires": []}),
    ]  # fmt: skip
    for name, change in good:
        yield Case(f"field-{name}", f"the fields {change}", changed(base, lambda d, c=change: d.fields.update(c)))
    metrics = {"loss": 0.5, "n": 3, "inf": "inf", "nan": "nan", "own": "nan:7ff8000000000001", "": -0.0}
    yield Case("field-metrics", "metrics", changed(base, lambda d: d.fields.update(metrics=metrics)), metrics=metrics)
    bad: list[dict[str, Any]] = [{name: ...} for name in ("created", "software", "files", "tree", "leaves")]
    bad += [{"step": value} for value in (-1, 2**53 + 1, 1.0, "1", None, True)]
    bad += [
        {"metrics": value}
        for value in ({"a": "many"}, {"a": None}, {"a": True}, {"a": [1]}, [], None, {"a": "nan:7ff8000000000000"})
    ]
    bad += [{"metadata": value} for value in (2**64, [-(2**63) - 1], {"a": 10**30}, nest(201))]
    bad += [{"more": nest(201)}, {"layouts": [{"cuts": [[0, 1]] * 65, "holders": 0}], "holders": [[[0]]]}]
    bad += [{"created": value} for value in ("yesterday", "2026-11-22", "2026-11-22T12:00:00", "2026-11-22 12:00:00Z", "2026-13-22T12:00:00Z",
                                             "2026-11-22T12:00:00.1234567Z", "2026-11-22T25:00:00Z", "20261122T120000Z", "1969-12-31T23:59:59Z", "9999-01-01T00:00:00Z", "2026-11-22T12:00:60Z", "2026-11-22T12:00:00+24:00", "2026-11-22T12:00:00.Z",5, None, "٢٠٢٦-11-22T12:00:00Z")]  # fmt: skip
    bad += [{"software": value} for value in ({"a": 1}, [], None, "treering")]
    bad += [{"tree": 0}, {"tree": None}, {"leaves": None}, {"leaves": {}}, {"files": {}}, {"layouts": {}}]
    bad += [
        {"metadata": {"a": ["nan", 1.5, "x"], "~2": "inf"}, "metadata_floats": value}
        for value in (
            ["/a/3"],
            ["/a/1"],
            ["/a/2"],
            ["/a/00"],
            ["/a/-"],
            ["/a/-1"],
            ["a/0"],
            ["/a/0/0"],
            ["/a"],
            [""],
            ["/b"],
            ["/~2"],
            ["/a/0", "/a/0"],
            [0],
            "/a/0",
            {},
            None,
        )
    ]
    bad += [{"metadata_floats": [""]}, {"metadata": "nan:7ff8000000000000", "metadata_floats": [""]}]
    for name, change in zip(numbered("bad-field", len(bad)), bad, strict=True):
        about = ", ".join(f"{key}: {'missing' if value is ... else value}" for key, value in change.items())
        yield refused(name, f"the field {about}", base, lambda d, c=change: d.fields.update(c))


def future() -> Iterator[Case]:
    envelopes: list[dict[str, Any]] = [
        {"version": value} for value in (0, 2, "1", "2", 1.0, True, None, [1], {"major": 2}, ..., 10**30)
    ]
    envelopes += [{"format": value} for value in ("Treering", "treering-next", None, 1, ..., ["treering"])]
    envelopes += [
        {"requires": value}
        for value in (["zstd"], [{"name": "zstd", "level": 3}], {"zstd": 1}, "zstd", None, 0, False, {}, "", [[]])
    ]
    envelopes += [
        {"version": 2, "files": ...},
        {"version": 2, "files": [{"name": "a"}]},
        {"version": 2, "leaves": 5, "tree": {}},
    ]
    for name, change in zip(numbered("future", len(envelopes)), envelopes, strict=True):
        about = ", ".join(f"{key}: {'missing' if value is ... else value}" for key, value in change.items())
        yield refused(name, f"an envelope with {about}", base, lambda d, c=change: d.fields.update(c))
    only = Draft(text=lambda t: b'{"format":"treering","version":9}')
    yield Case("future-envelope-only", "nothing but the envelope", only, "unsupported")
    for name, listed in [("file", {"requires": ["zstd"]}), ("file-bare", {"requires": ["zstd", "x"], "header": None, "xxh3": None}),
                         ("file-empty", {"requires": []})]:  # fmt: skip
        draft = changed(cut, lambda d, c=listed: d.files["1.safetensors"].listed.update(c))
        later = {} if name == "file-empty" else {"s": "unsupported"}
        yield Case(f"requires-{name}", f"an entry of files with {listed}", draft, leaves=later)
    for name, where in [
        ("leaf", {"requires": ["delta"]}),
        ("leaf-more", {"requires": ["zstd", "delta"], "chunks": [[0, 1]], "of": None}),
    ]:
        draft = changed(base, lambda d, w=where: d.leaves[0].__setitem__(6, w))
        yield Case(f"requires-{name}", f"an array at {where}", draft, leaves={"a": "unsupported"})
    draft = changed(base, lambda d: d.leaves[0].__setitem__(6, {"requires": ["delta"]}))
    draft.child("t")
    draft.leaves.append(["array", "t", "jax", "int32", [3], "", "a"])
    draft.content["t"] = "unsupported"
    yield Case("requires-tie", "an array that is another, which requires something", draft, leaves={"a": "unsupported"})
    for name, where in zip(
        numbered("bad-requires", 5),
        [{}, {"requires": []}, {"requires": "zstd"}, {"requires": [1]}, {"needs": ["x"]}],
        strict=True,
    ):
        yield refused(name, f"an array at {where}", base, lambda d, w=where: d.leaves[0].__setitem__(6, w))
    for name, value in zip(numbered("bad-requires-file", 4), ["zstd", [1], {}, 5], strict=True):
        yield refused(
            name,
            f"an entry of files that requires {value}",
            base,
            lambda d, v=value: d.files["a.safetensors"].listed.update(requires=v),
        )
    bare = changed(base, lambda d: d.files["a.safetensors"].listed.update(requires=["x"], size=None))
    yield Case(
        "bad-requires-file-size", "an entry of files that requires something and has no size", bare, "unsupported"
    )


def late() -> Iterator[Case]:
    def name(files: Files, time: int, random: str = "abcdef") -> str:
        return f"metrics-{checksum(files['treering.json'])}-{time:020}-{random}.json"

    def made(*texts: bytes, start: int = 5) -> Callable[[Files], Files]:
        return lambda files: {name(files, start + n): text for n, text in enumerate(texts)}

    def case(about: str, label: str, texts: list[bytes], verdicts: list[str], metrics: dict[str, Any]) -> Case:
        draft = changed(base, lambda d: d.fields.update(metrics={"loss": 9.0, "old": 1.0}))
        more = made(*texts)
        found = dict(zip(more(draft.written()), verdicts, strict=True))
        return Case(f"late-{label}", about, draft, more=more, metrics={"loss": 9.0, "old": 1.0} | metrics, late=found)

    def text(**about: Any) -> bytes:
        return sealed(json.dumps(about, separators=(",", ":")).encode())

    plain = {"format": "treering-metrics", "version": 1}
    yield case(
        "metrics that were found later",
        "plain",
        [text(**plain, metrics={"loss": 0.5, "b": "inf"})],
        ["valid"],
        {"loss": 0.5, "b": "inf"},
    )
    yield case("without format and version", "bare", [text(metrics={"loss": 0.5})], ["valid"], {"loss": 0.5})
    two = [text(**plain, metrics={"loss": 0.5, "x": 1}), text(**plain, metrics={"loss": 0.25})]
    yield case("two files of different times", "two", two, ["valid", "valid"], {"loss": 0.25, "x": 1})
    yield case("with a field nobody knows", "unknown", [text(**plain, metrics={"a": 1}, more=[1])], ["valid"], {"a": 1})
    yield case("without metrics in it", "empty", [text(**plain, metrics={})], ["valid"], {})
    wrong: list[tuple[str, bytes]] = [
        ("version", text(format="treering-metrics", version=2, metrics={"a": 1})), ("format", text(format="x", version=1, metrics={"a": 1})),
        ("requires", text(**plain, requires=["x"], metrics={"a": 1})), ("none", text(**plain)), ("list", text(**plain, metrics=[1])),
        ("value", text(**plain, metrics={"a": {}})), ("text", text(**plain, metrics={"a": "many"})), ("null", text(**plain, metrics={"a": None})),
        ("twice", sealed(b'{"metrics":{"a":1,"a":2}}')), ("manifest-format", text(format="treering", version=1, metrics={"a": 1})),
        ("version-null", text(format="treering-metrics", version=None, metrics={"a": 1})),
    ]  # fmt: skip
    for label, data in wrong:
        yield case(
            f"not understood: {label}", f"later-{label}", [data, two[1]], ["unsupported", "valid"], {"loss": 0.25}
        )
    good = two[0]
    for label, data in [
        ("cut", good[:-1]),
        ("flip", good.replace(b"0.5", b"0.4")),
        ("empty", b""),
        ("unsealed", b'{"metrics":{"a":1}}\n'),
    ]:
        yield case(f"damaged: {label}", f"damaged-{label}", [data, two[1]], ["damaged", "valid"], {"loss": 0.25})
    other = changed(base, lambda d: None)
    names = ["metrics-0123456789abcdef-00000000000000000005-abcdef.json", "metrics.json.abcdef.tmp", "metrics-x.json"]
    yield Case(
        "late-of-another",
        "metrics of another manifest, and files that are left over",
        other,
        more=lambda files: dict.fromkeys(names, good),
    )
    tied = changed(base, lambda d: None)

    def more(files: Files) -> Files:
        return {name(files, 5, "00000a"): two[0], name(files, 5, "00000b"): two[1]}

    yield Case("late-same-time", "two files of one time: the greater name counts", tied, more=more, metrics={"loss": 0.25, "x": 1},
               late=dict.fromkeys(more(tied.written()), "valid"))  # fmt: skip
    flawed = [
        f"metrics-{{}}-{stamp}-{random}.json"
        for stamp, random in [("5", "abcdef"), ("٠" * 20, "abcdef"), ("0" * 20, "ABCDEF")]
    ]
    yield Case("late-names", "files whose names are none of metrics", changed(base, lambda d: None),
               more=lambda files: {n.format(checksum(files["treering.json"])): good for n in flawed})  # fmt: skip
