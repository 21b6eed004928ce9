"""One session, all lanes: see `lanes` for what there is, `launches` for how tests/ranks runs, `rank_agreement` for inside."""

import os

pytest_plugins = ["tests.lanes", "tests.launches"]

os.environ["MPISTRAT_STRICT"] = "1"
os.environ["MPISTRAT_TUNING"] = "off"  # what was measured on this machine changes no test
os.environ["MPISTRAT_MPI_GPU"] = "off"  # nobody asks the MPI library, and keeps the answer, but the test that does
os.environ["MPISTRAT_DEVICE"] = "cpu"  # what wants a GPU says so, also on a machine that has one
