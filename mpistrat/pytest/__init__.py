"""A plugin for pytest: tests that run on several ranks, in MPI jobs that plain ``pytest`` starts.

    @pytest.mark.ranks(2, 4, nodes="2x2")
    def test_sum(communicator):
        assert communicator.all_reduce("sum", numpy.ones(3))[0] == communicator.size

is three tests: on 2 ranks, on 4 ranks, and on 4 ranks as two nodes of two. Installing mpistrat installs the plugin.
"""
