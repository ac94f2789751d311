import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the dependency group `torch`")

from torch.utils.data import DataLoader  # noqa: E402  # only where torch is

from lazyshards import concat, mix, open_shards, zip_shards  # noqa: E402
from lazyshards.errors import UnsupportedDtypeError  # noqa: E402
from lazyshards.testing import RecordingStorage, with_storage, write_npy_shards  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_numpy")

WHOLE = np.arange(120, dtype="f4").reshape(40, 3)


@pytest.fixture
def ds(tmp_path):
    """Write forty rows in three shards."""
    write_npy_shards(tmp_path / "x", np.split(WHOLE, [7, 20]))
    return open_shards(tmp_path / "x")


@pytest.fixture
def both(ds, tmp_path):
    """Write labels beside the rows."""
    write_npy_shards(tmp_path / "y", [np.arange(40)])
    return zip_shards(x=ds, y=open_shards(tmp_path / "y"))


@pytest.mark.parametrize("function", [torch.as_tensor, torch.tensor, torch.asarray, torch.from_dlpack])
def test_torch_takes_a_dataset_itself(ds, function):
    """Functions of torch that make a tensor of an array make one of what is selected."""
    found = function(ds[5:30, 1])
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), WHOLE[5:30, 1])
    assert float(function(ds[3, 2])) == WHOLE[3, 2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [False, True])
def test_a_loader_reads_the_rows(ds, workers, collate):
    """A DataLoader yields the dataset's rows as tensors, with and without workers, however they are collated."""
    data = ds.to_torch()
    loader = DataLoader(data, batch_size=16, num_workers=workers, collate_fn=data.collate if collate else None)
    found = list(loader)
    assert [tuple(batch.shape) for batch in found] == [(16, 3), (16, 3), (8, 3)]
    assert all(isinstance(batch, torch.Tensor) for batch in found)
    np.testing.assert_array_equal(torch.cat(found).numpy(), WHOLE)


@pytest.mark.parametrize("collate", [False, True])
def test_a_loader_reads_a_bundle(both, collate):
    """Rows of a bundle are dicts, whose parts stay together through torch's own shuffle."""
    data = both.to_torch()
    assert len(data) == 40
    assert data[3]["y"] == 3
    assert data[-1]["x"].tolist() == WHOLE[-1].tolist()
    rows = 0
    for batch in DataLoader(data, batch_size=7, shuffle=True, collate_fn=data.collate if collate else None):
        np.testing.assert_array_equal(batch["x"][:, 0].numpy(), batch["y"].numpy() * 3)
        rows += len(batch["y"])
    assert rows == 40


def test_a_batch_is_one_read(ds):
    """The rows of a batch are read together: neighbours in one request."""
    storage = RecordingStorage(ds._layout.storage)
    data = with_storage(ds, storage).to_torch()
    data.__getitems__(list(range(20, 36)))
    assert len(storage.reads) == 1


def test_dtypes_that_torch_lacks(ds):
    """A dtype that torch lacks is refused when the torch dataset is made."""
    with pytest.raises(UnsupportedDtypeError, match="torch has no tensors of"):
        ds.astype("S8", casting="unsafe").to_torch()


def test_batches_keep_their_state(both):
    """Batches as an IterableDataset go on, in a new loader, at the very next batch of our own order."""
    data = both.batches(8, shuffle=True, seed=4).to_torch()
    whole = [batch["y"].tolist() for batch in DataLoader(data, batch_size=None)]
    assert sorted(row for batch in whole for row in batch) == list(range(40))
    assert len(DataLoader(data, batch_size=None)) == 5
    one = both.batches(8, shuffle=True, seed=4).to_torch()
    running = iter(DataLoader(one, batch_size=None))
    assert [next(running)["y"].tolist(), next(running)["y"].tolist()] == whole[:2]
    other = both.batches(8, shuffle=True).to_torch()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert [batch["y"].tolist() for batch in DataLoader(other, batch_size=None)] == whole[2:]


def numbered(batch):
    """Return the first elements of the rows of a batch, as tensors or as arrays."""
    return (batch["x"] if isinstance(batch, dict) else batch)[:, 0].tolist()


@pytest.mark.parametrize("kind", ["bundle", "concat", "mixture"])
@pytest.mark.parametrize("shuffle", [False, True, "blocks", "shards"])
def test_every_kind_goes_through_a_loader(ds, both, kind, shuffle):
    """Batches of bundles, joined datasets and mixtures are tensors in our own order, resumed in another batch size."""
    source = {"bundle": both, "concat": concat([ds[20:], ds[:20]]), "mixture": mix({ds[:30]: 2, ds[30:]: 1})}[kind]
    options = {"shuffle": shuffle, "seed": 4, "block_rows": 4, "window_blocks": 2}
    whole = [row for batch in source.batches(7, **options) for row in numbered(batch)]
    assert len(whole) == len(source)
    data = source.batches(7, **options).to_torch()
    running = iter(DataLoader(data, batch_size=None))
    found = [row for _ in range(3) for row in numbered(next(running))]
    assert found == whole[:21]
    other = source.batches(4, **options, progress=True).to_torch()
    other.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert [row for batch in DataLoader(other, batch_size=None) for row in numbered(batch)] == whole[21:]


@pytest.mark.parametrize("kind", ["bundle", "concat"])
def test_every_kind_has_a_map_style_dataset(ds, both, kind):
    """Bundles and joined datasets are map-style datasets, too, whose rows a DataLoader shuffles."""
    data = {"bundle": both, "concat": concat([ds[20:], ds[:20]])}[kind].to_torch()
    loader = DataLoader(data, batch_size=7, shuffle=True, collate_fn=data.collate)
    assert sorted(row for batch in loader for row in numbered(batch)) == WHOLE[:, 0].tolist()


def test_a_mixture_is_no_map_style_dataset(ds):
    """Rows of a mixture have no fixed numbers: the error says that its batches go to torch."""
    with pytest.raises(TypeError, match=r"mixture\.batches\(256, shuffle=True\)\.to_torch\(\)"):
        mix({ds[:30]: 2, ds[30:]: 1}).to_torch()


def test_batches_in_several_workers_are_refused(ds):
    """Several workers, each of which would yield every batch, are refused."""
    loader = DataLoader(ds.batches(8).to_torch(), batch_size=None, num_workers=2)
    with pytest.raises(RuntimeError, match="use num_workers=0"):
        list(loader)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("kind", ["rows", "batches", "bundle", "mixture"])
@pytest.mark.parametrize("workers", [0, 1])
def test_stateful_data_loader(ds, both, kind, workers):
    """Torchdata's StatefulDataLoader saves and resumes both kinds in the middle of an epoch, exactly."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")

    def make():
        if kind != "rows":
            source = {"batches": ds, "bundle": both, "mixture": mix({ds[:30]: 2, ds[30:]: 1})}[kind]
            data = source.batches(8, shuffle=True, seed=1).to_torch()
            return stateful.StatefulDataLoader(data, batch_size=None, num_workers=workers)
        data = ds.to_torch()
        generator = torch.Generator().manual_seed(3)
        return stateful.StatefulDataLoader(
            data, batch_size=8, shuffle=True, generator=generator, num_workers=workers, collate_fn=data.collate
        )

    whole = [numbered(batch) for batch in make()]
    loader = make()
    running = iter(loader)
    found = [numbered(next(running)) for _ in range(2)]
    state = loader.state_dict()
    other = make()
    other.load_state_dict(state)
    found += [numbered(batch) for batch in other]
    assert found == whole


def test_dlpack(ds):
    """Results are handed to torch through DLPack, without a copy."""
    rows = ds[3:9].compute()
    tensor = torch.from_dlpack(rows)
    assert tensor.data_ptr() == rows.ctypes.data
    batch = next(iter(ds.batches(8)))
    assert torch.from_dlpack(batch).shape == (8, 3)
