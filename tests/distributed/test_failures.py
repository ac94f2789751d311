import pytest

PATIENCE_S = 30
"""Seconds within which every rank must know; a collective takes a tenth of one on a crowded machine."""


@pytest.fixture(scope="module")
def failures():
    """Keep what was found: one run goes through all failures."""
    return {}


@pytest.fixture
def found(launch, shards, failures):
    """Give what each rank found, by what went wrong."""
    if not failures:
        failures["run"] = launch("failures", shards, timeout=200)  # once, also if it fails
    if len(failures) == 1:
        reports = failures["run"].well()
        failures.update({name: [report["found"][name] for report in reports] for name in reports[0]["found"]})
        failures["seconds"] = max(max(report["seconds"].values()) for report in reports)
    return failures


def assert_mismatch(outcomes, *words):
    """Every rank raised the one error, and it holds these words."""
    for kind, message in outcomes:
        assert kind == "RankMismatchError", message
        assert "rank 1" in message
        for word in words:
            assert word in message, message
    # The same text on all, but for the path that each gave to open_shards.
    assert len({message.partition(": ")[2] for _, message in outcomes}) == 1


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("missing_last", ("shards 4", "shards 5", "rows 2001", "rows 2400", "fingerprint")),
        ("missing_middle", ("LayoutError", "hole")),
        ("missing_all", ("ShardsNotFoundError", "does not exist")),
        ("resized", ("rows 2300", "rows 2400")),
        ("other_dtype", ("float64", "float32")),
        ("damaged", ("LayoutError",)),
    ],
)
def test_open_differs(found, harm, words):
    """If one rank sees other files, or cannot open them, opening is one error on all ranks, saying which and what."""
    assert_mismatch(found[f"open: {harm}"], *words)


def test_open_fails_everywhere(found):
    """What fails on every rank in the same way is the usual error, not one about ranks."""
    assert {kind for kind, _ in found["open: missing for all"]} == {"ShardsNotFoundError"}


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("read: vanished", "ShardReadError"),
        ("read: rewritten", "ShardChangedError"),
        ("batches: vanished", "ShardReadError"),
    ],
)
def test_errors_travel(found, case, kind):
    """A leaf that fails on one rank raises the same error on all."""
    assert found[case][0] == found[case][1]
    assert found[case][0][0] == kind
    assert "/shard_0003" in found[case][0][1]


def test_refresh_differs(found):
    """With on_change="refresh", a shard that became another on one rank is one error on all."""
    assert {kind for kind, _ in found["refresh: rewritten"]} == {"RankMismatchError"}


@pytest.mark.parametrize("case", ["too large", "batches too large"])
def test_what_does_not_fit(found, case):
    """A result that does not fit is refused on all ranks, before it is read."""
    assert {kind for kind, _ in found[case]} == {"CapacityError"}


def test_what_fits(found):
    """Whether it fits does not depend on what each rank's collector has left to collect."""
    assert found["large"][0] == found["large"][1]
    assert found["large"][0][0] == "returned"


@pytest.mark.parametrize("case", ["after it", "after them", "after too large", "after all"])
def test_next_compute_works(found, case):
    """After an error the next compute works, on every rank."""
    assert found[case][0][0] == "returned"
    assert found[case][0] == found[case][1] == found["after it"][0]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("rows of its own", ("which rows",)),
        ("a slice of its own", ("rows wanted 1001", "rows wanted 1000")),
        ("a seed of its own", ("which rows",)),
        ("a batch size of its own", ("rows wanted 11", "rows wanted 10")),
        ("a state of its own", ("which rows",)),
    ],
)
def test_program_differs(found, case, words):
    """Ranks that ask for different things get one error on all of them, before anything is launched."""
    assert_mismatch(found[case], *words)


def test_numpy_is_its_own(found):
    """With the NumPy engine a rank may do what the others do not."""
    assert {kind for kind, _ in found["on NumPy, alone"]} == {"returned"}


def test_within_seconds(found):
    """None of it takes long."""
    assert found["seconds"] < PATIENCE_S


def test_one_rank_fails_alone(launch, shards):
    """A program that fails on one rank only ends on all, and says why."""
    done = launch("alone", shards, timeout=100)
    assert done.status != 0
    assert "only here" in done.said


def test_one_rank_speaks(launch, shards):
    """Plans and warnings come from one rank, and a child of a rank reads with NumPy and does not hang."""
    done = launch("voices", shards)
    reports = done.well()
    assert done.said.count("rows 1,000 to 1,500") == 1 or done.said.count("500") >= 1
    assert [report["warned"] for report in reports] == [1, 0]
    assert all(report["child"] == "numpy (5, 3, 2)\n" for report in reports)
