from tests.servers import RangeServer
def test_x():
    """x"""
