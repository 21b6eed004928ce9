"""The site builds without a warning, its links lead somewhere, and API pages say what docstrings say."""

import re
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.pages import ROOT, pages
from tests.docs.surface import api_names
from tests.processes import run_bounded

SECONDS = 300.0  # it needs 15; this is for a machine that has much else to do


class Page(HTMLParser):
    """What a page refers to, and what can be referred to in it."""

    def __init__(self, text):
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values["id"]} if "id" in values else set()
        targets = [values[name] for name in ("href", "src") if name in values]
        self.targets += targets
        self.loaded += targets if tag != "a" else []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Give the folder of the built site. Building it starts neither MPI nor CUDA."""
    folder = tmp_path_factory.mktemp("site")
    program = (
        "import sys\n"
        "from sphinx.cmd.build import main\n"
        "code = main(sys.argv[1:])\n"
        "sys.exit(code or {'mpi4py.MPI', 'cupy'} & set(sys.modules) or 0)\n"
    )
    options = ["-q", "-W", "--keep-going", "-c", "docs", ".", str(folder)]
    done = run_bounded([sys.executable, "-c", program, *options], SECONDS, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def built(site):
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def text_of(path):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", path.read_text()))


def test_every_page_is_in_the_site_and_what_is_inherited_is_described_once(site):
    assert [page for page in pages() if not (site / page.relative_to(ROOT)).with_suffix(".html").exists()] == []
    assert "README.html" in (site / "index.html").read_text()
    text = text_of(site / "docs" / "reference" / "api" / "MirroredStrategy.html")
    assert "Bases: mpistrat.Strategy" in text
    assert "experimental_distribute_dataset(" not in text


def test_links_and_pictures_lead_somewhere_and_nothing_is_loaded_from_elsewhere(built):
    broken = []
    for path, page in built.items():
        for target in page.targets:
            parts = urlsplit(target)
            aim = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.scheme or parts.netloc:
                continue
            if not aim.exists() or (parts.fragment and aim in built and unquote(parts.fragment) not in built[aim].ids):
                broken.append(f"{path.name}: {target}")
    assert broken == []
    assert {target for page in built.values() for target in page.loaded if urlsplit(target).netloc} == set()


def test_every_public_name_has_a_page_and_a_link_from_the_table(site, built):
    table = built[site / "docs" / "reference" / "api.html"]
    for name in api_names():
        assert f"api/{name}.html#mpistrat.{name}" in table.targets, name


def test_api_pages_say_parameters_defaults_and_errors(site, built):
    path = site / "docs" / "reference" / "api" / "Strategy.html"
    text = text_of(path)
    assert "run(fn, args=(), kwargs=None, options=None)" in text
    assert "Call fn once on each replica" in text
    assert "args, kwargslist or tuple, mapping" in text  # the theme sets the colon
    assert "If args is neither a list nor a tuple." in text
    targets = built[path].targets
    assert "InputOptions.html#mpistrat.InputOptions" in targets, "a type is a link"
    assert "errors.html#mpistrat.errors.InvalidArgumentError" in targets
    assert path.read_text().index('id="mpistrat.Strategy.run"') < path.read_text().index('id="mpistrat.Strategy.unwrap"')
