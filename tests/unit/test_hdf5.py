import h5py
import pytest

from lazyshards.testing import FormatConformance, DTYPES

pytestmark = pytest.mark.usefixtures("on_numpy")


class TestContiguous(FormatConformance):
    """Contiguous datasets, as h5py writes them."""

    format = "hdf5"
    options = {"dataset": "data"}

    def write(self, path, array):
        """Write with h5py."""
        with h5py.File(path, "w") as file:
            file["data"] = array


class TestDeflate(FormatConformance):
    format = "hdf5"

    def write(self, path, array):
        """Write with h5py."""
        with h5py.File(path, "w") as file:
            file.create_dataset("data", data=array, chunks=tuple(max(1, n // 2) for n in array.shape), compression="gzip", shuffle=True, fletcher32=True)

class TestLzf(FormatConformance):
    format = "hdf5"

    def write(self, path, array):
        """Write with h5py."""
        with h5py.File(path, "w") as file:
            file.create_dataset("data", data=array, chunks=tuple(max(1, n // 2) for n in array.shape), compression="lzf", shuffle=True)
