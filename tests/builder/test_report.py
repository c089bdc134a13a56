"""The report: same facts, same bytes; one page that needs nothing else; the right figures."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from tests.support.caches import uniform_layout
from trtc.builder.report import (
    Report,
    make_report,
    report_html,
    short_expert,
    starved_note,
    summary,
    verdict,
    write_report,
)
from trtc.builder.report_frontier import FrontierPoint, frontier_plot
from trtc.builder.report_plot import (
    SHADES,
    STEPS,
    Scale,
    byte_bars,
    find_sites,
    heat_map,
    measured_range,
    ramp,
    short_name,
    worst_strip,
)
from trtc.protos.manifest import (
    AccuracyFacts,
    ByteLedger,
    LayerError,
    Limits,
    Manifest,
    ModelFacts,
    SchemeFacts,
    TargetFacts,
)
from trtc.quant.calibration_facts import CalibrationFacts

LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def layer_error(layer: str, decibels: float, largest: float = 0.5) -> LayerError:
    return LayerError(layer=layer, sqnr_db=decibels, max_abs_error=largest)


def dense_errors(num_layers: int = 3) -> tuple[LayerError, ...]:
    return tuple(
        layer_error(f"model.layers.{layer}.{linear}", 20.0 + layer + row / 10)
        for layer in range(num_layers)
        for row, linear in enumerate(LINEARS)
    )


def a_manifest(
    layers: tuple[LayerError, ...] = (), *, measured: bool = True, compared: bool = True
) -> Manifest:
    accuracy = AccuracyFacts(
        text="default",
        text_sha256="cd" * 32,
        tokens=4088,
        perplexity=8.2,
        reference_perplexity=8.0 if compared else None,
        kl=0.0234 if compared else None,
        top1=0.951 if compared else None,
        measured_on="cpu:x86-64-v3",
        layers=layers,
    )
    return Manifest(
        trtc_version="1.2.3",
        model=ModelFacts(
            name="tiny <b>llama</b>",
            family="llama",
            architecture="LlamaForCausalLM",
            vocab_size=256,
            hidden_size=64,
            num_layers=3,
            num_parameters=7_340_032,
            max_position_embeddings=2048,
            bos_token_id=1,
            eos_token_ids=(2,),
            pad_token_id=None,
        ),
        scheme=SchemeFacts(
            name="int4_awq",
            kv_dtype="bf16",
            source="inline",
            exact_activations=False,
            calibration_sha256="ab" * 32,
        ),
        target=TargetFacts(
            kind="cpu", name="cpu:x86-64-v3", archs=("x86-64-v3",), toolchain="g++ 13"
        ),
        kv=uniform_layout(num_layers=3, page_size=16, num_kv_heads=2, head_dim=32, dtype="bf16"),
        limits=Limits(max_batch_size=8, max_seq_len=1000, max_num_tokens=256),
        ledger=ByteLedger(weights=7_340_032, activations=1 << 20, page=24_576),
        has_tokenizer=True,
        accuracy=accuracy if measured else None,
        files={},
    )


def a_report(layers: tuple[LayerError, ...] | None = None, **manifest: bool) -> Report:
    layers = dense_errors() if layers is None else layers
    facts = CalibrationFacts(
        source="default",
        sha256="ab" * 32,
        tokens=8192,
        layers=layers,
        starved_experts=("model.layers.1.mlp.experts.5",),
    )
    return make_report(a_manifest(layers, **manifest), facts, ["mind <this>"])


class Page(HTMLParser):
    """Tags opened, attributes that load something, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_needs_nothing_else() -> None:
    source = report_html(a_report())
    page = Page(source)
    assert page.loads == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert "@import" not in source and "url(" not in source
    assert "$" not in source


def test_same_facts_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_report(a_report(), tmp_path / name)
    for file in ("report.json", "report.html"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_page_does_not_tell_when_or_where_it_was_made() -> None:
    source = report_html(a_report())
    assert not re.search(r"\b20\d\d-\d\d-\d\d|\d\d:\d\d:\d\d", source)
    assert str(Path.cwd()) not in source


def test_json_holds_the_whole_report(tmp_path: Path) -> None:
    report = a_report()
    write_report(report, tmp_path)
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report) == report


def test_names_are_escaped() -> None:
    source = report_html(a_report())
    assert "<b>llama" not in source and "<this>" not in source
    assert "tiny <b>llama</b>" in Page(source).text


def test_headline_figures() -> None:
    text = Page(report_html(a_report())).text
    for figure in (
        "0.0234",
        "95.1",
        "8.200",
        "8.000 before, +2.50 %",
        "7.34",
        "2.00 times smaller",
    ):
        assert figure in text
    assert "close to the original" in text


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (7_340_032, "2.00 times smaller than bf16"),
        (2 * 7_340_032, "as large as bf16"),
        (3 * 7_340_032, "1.50 times as large as bf16"),
    ],
)
def test_size_beside_bf16(weights: int, words: str) -> None:
    report = a_report()
    ledger = msgspec.structs.replace(report.ledger, weights=weights)
    assert words in Page(report_html(msgspec.structs.replace(report, ledger=ledger))).text


def test_without_a_reference_only_perplexity_is_told() -> None:
    text = Page(report_html(a_report(compared=False))).text
    assert "8.200" in text
    assert "no unquantised checkpoint" in text
    assert "original" not in text


def test_unmeasured_engine_says_so() -> None:
    page = Page(report_html(a_report(layers=(), measured=False)))
    assert "not measured by this build" in page.text
    assert page.tags.count("svg") == 1


def test_byte_ledger_counts_the_pages_of_a_whole_context() -> None:
    # 1000 tokens take 63 pages of 16; 63 * 24576 bytes.
    assert "1.55 MB = 63 pages of 24.58 kB" in Page(report_html(a_report())).text


def test_a_sharded_engine_is_measured_whole_and_told_by_rank() -> None:
    report = a_report()
    sharded = msgspec.structs.replace(
        report, target=msgspec.structs.replace(report.target, kind="cuda", tp=2)
    )
    text = Page(report_html(sharded)).text
    assert "as large as bf16" in text  # two ranks of half of that
    assert "On each of the 2 GPUs." in text and "in bf16 (7.34 MB)" in text
    console = Console(width=110, record=True, color_system=None)
    with console.capture() as capture:
        console.print(summary(sharded))
    told = capture.get()
    assert "14.68 MB, as large as bf16" in told
    assert "2 GPUs, each with 7.34 MB of weights" in told


def test_starved_experts_and_notes_are_told() -> None:
    text = Page(report_html(a_report())).text
    assert "layer 1 expert 5" in text
    assert "mind <this>" in text


def test_a_note_names_the_first_of_many_starved_experts() -> None:
    names = [f"model.layers.2.mlp.experts.{number}" for number in range(11)]
    assert starved_note(names[:1]).endswith("layer: layer 2 expert 0")
    assert starved_note(names).endswith("layer 2 expert 7 and 3 more")


def cells(svg: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(svg)
    return [e for e in root.iter("rect") if e.get("class", "").startswith("cell")]


def test_heat_map_has_a_cell_a_linear_in_its_shade() -> None:
    errors = dense_errors(4)
    found = cells(heat_map(errors))
    assert len(found) == len(errors)
    by_title = {(cell.findtext("title") or "").split("\n")[0]: cell for cell in found}
    for error in errors:
        assert by_title[error.layer].get("class") == f"cell s{SHADES.shade(error.sqnr_db)}"


def test_heat_map_places_layers_left_to_right_and_kinds_downwards() -> None:
    found = {
        (cell.findtext("title") or "").split("\n")[0]: cell
        for cell in cells(heat_map(dense_errors()))
    }

    def at(name: str) -> tuple[float, float]:
        cell = found[f"model.layers.{name}"]
        return float(cell.get("x", "")), float(cell.get("y", ""))

    assert at("0.self_attn.q_proj")[0] < at("1.self_attn.q_proj")[0]
    assert at("0.self_attn.q_proj")[1] == at("2.self_attn.q_proj")[1]
    rows = [at(f"0.{linear}")[1] for linear in LINEARS]
    assert rows == sorted(rows) and len(set(rows)) == len(rows)


def test_layer_that_was_not_quantised_is_an_empty_cell() -> None:
    errors = [e for e in dense_errors() if e.layer != "model.layers.1.mlp.down_proj"]
    root = ElementTree.fromstring(heat_map(errors))
    assert len([e for e in root.iter("rect") if e.get("class") == "empty"]) == 1


def test_experts_share_their_cell() -> None:
    errors = [layer_error(f"model.layers.0.mlp.experts.{n}.up_proj", 20.0 + n) for n in range(4)]
    found = cells(heat_map([*dense_errors(1), *errors]))
    ups = [c for c in found if "experts" in (c.findtext("title") or "")]
    assert len(ups) == 4
    assert len({c.get("x") for c in ups}) == 4


def test_of_many_experts_the_noisiest_are_drawn() -> None:
    errors = [layer_error(f"model.layers.0.mlp.experts.{n}.w2", 20.0 + n) for n in range(64)]
    titles = [c.findtext("title") or "" for c in cells(heat_map(errors))]
    assert len(titles) == 16
    assert any("experts.0." in title for title in titles)
    assert not any("experts.63." in title for title in titles)


@pytest.mark.parametrize("num_layers", [1, 2, 33, 126])
def test_plots_of_any_depth_are_well_formed(num_layers: int) -> None:
    errors = dense_errors(num_layers)
    for svg in (heat_map(errors), worst_strip(errors)):
        ElementTree.fromstring(svg)
        assert "nan" not in svg


def test_worst_strip_lists_the_noisiest_first() -> None:
    svg = worst_strip([layer_error("model.layers.7.mlp.down_proj", 3.0), *dense_errors()])
    names = re.findall(r'class="name"[^>]*>([^<]+)<', svg)
    assert names[0] == "layer 7 down"
    assert len(names) == 12


def test_equal_errors_can_be_drawn() -> None:
    errors = [layer_error(f"model.layers.{n}.mlp.up_proj", 30.0) for n in range(3)]
    for svg in (heat_map(errors), worst_strip(errors)):
        ElementTree.fromstring(svg)


def test_byte_bars_are_in_proportion() -> None:
    root = ElementTree.fromstring(byte_bars([("a", 100, ""), ("b", 50, "")], ("full", 200)))
    widths = {e.get("class"): float(e.get("width", "")) for e in root.iter("rect")}
    assert widths["bar"] * 2 == pytest.approx(widths["ghost"])
    assert widths["bar"] == pytest.approx(2 * widths["bar-soft"])


def test_shades() -> None:
    scale = Scale(10.0, 30.0)
    assert scale.shade(30.0) == 0
    assert scale.shade(10.0) == STEPS - 1
    assert scale.shade(-5.0) == STEPS - 1 and scale.shade(99.0) == 0
    shades = [scale.shade(decibels) for decibels in range(10, 31)]
    assert shades == sorted(shades, reverse=True)


def test_measured_range_is_never_empty() -> None:
    assert measured_range([layer_error("x", 22.0)]) == Scale(20.0, 30.0)
    assert measured_range([layer_error("x", 22.0), layer_error("y", 41.0)]) == Scale(20.0, 45.0)


def test_ramp_goes_from_stop_to_stop() -> None:
    colours = ramp(("#000000", "#ffffff"))
    assert (colours[0], colours[-1], len(colours)) == ("#000000", "#ffffff", STEPS)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("model.layers.3.self_attn.qkv_proj", "layer 3 qkv"),
        ("model.layers.3.block_sparse_moe.experts.7.w3", "layer 3 up, expert 7"),
        ("some.other.thing", "some.other.thing"),
    ],
)
def test_short_names(layer: str, expected: str) -> None:
    assert short_name(layer) == expected


def test_linear_without_a_known_place_has_no_cell() -> None:
    assert find_sites([layer_error("model.layers.0.mixer.conv", 20.0)]) == ()


def test_short_expert() -> None:
    assert short_expert("model.layers.12.mlp.experts.5") == "layer 12 expert 5"


@pytest.mark.parametrize(
    ("kl", "words"), [(0.001, "hardly"), (0.03, "close"), (0.1, "visibly"), (3.0, "far")]
)
def test_verdicts(kl: float, words: str) -> None:
    assert verdict(kl).startswith(words)


@pytest.mark.parametrize("num_layers", [3, 80])
def test_terminal_summary(num_layers: int) -> None:
    console = Console(width=110, record=True, color_system=None)
    with console.capture() as capture:
        console.print(summary(a_report(dense_errors(num_layers))))
    told = capture.get()
    for words in ("0.0234 nats", "8.200 (8.000 before)", "95.1 %", "layer 0 q 20.0 dB", "down"):
        assert words in told
    assert max(len(line) for line in told.splitlines()) <= 110


def test_terminal_summary_of_an_unmeasured_engine() -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(summary(a_report(layers=(), measured=False)))
    assert "perplexity" not in capture.get()


def test_the_frontier_shows_the_chosen_size() -> None:
    sizes = ((4.125, 0.08, False), (4.8, 0.05, True), (16.0, 0.0, False))
    points = [
        FrontierPoint(bits=bits, kl=kl, kl_error=0.001, chosen=chosen) for bits, kl, chosen in sizes
    ]
    drawn = ElementTree.fromstring(frontier_plot(points))
    circles = list(drawn.iter("circle"))
    assert [float(one.get("r", 0)) for one in circles] == [4, 7, 4]
    across = [float(one.get("cx", 0)) for one in circles]
    down = [float(one.get("cy", 0)) for one in circles]
    assert across == sorted(across) and down == sorted(down)
    assert "4.80 bits, 0.0500" in {text.text for text in drawn.iter("text")}


def test_one_point_of_no_divergence_can_be_drawn() -> None:
    point = FrontierPoint(bits=16.0, kl=0.0, kl_error=0.0, chosen=True)
    assert ElementTree.fromstring(frontier_plot([point])) is not None
