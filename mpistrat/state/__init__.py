"""Variables: arrays that are equal on all replicas, or combined when they are read.

==============================  ==============================  ================================================
operation                       ON_WRITE                        ON_READ
==============================  ==============================  ================================================
read in ``run``                 this replica's array            this replica's array
read elsewhere                  this rank's array               arrays combined by `aggregation`; a collective;
                                                                NONE: refused
assign in ``run``               value combined by               this replica's array only
                                `aggregation`; a collective;
                                NONE: values must be equal
assign elsewhere                the value, on all               SUM: value / N on each replica; else the value
assign_add, _sub in ``run``     delta combined likewise         this replica's array only
assign_add, _sub elsewhere      the delta, on all               SUM: refused; else the delta
scatter updates in ``run``      the rows of all replicas;       refused
                                NONE: rows must be equal
… _min, _max, _update           ONLY_FIRST_REPLICA: the rows    refused
in ``run``                      of replica 0; NONE: rows must
                                be equal; else refused
scatter updates elsewhere       the rows, on all                refused
save: `numpy` elsewhere         this rank's array               the combined array
restore: `assign` elsewhere     the value, on all               reading returns the value
==============================  ==============================  ================================================

Inside the function that ``extended.update`` calls, all operations apply to this replica's array only; likewise for variables of
the default strategy, which are plain arrays. Under central storage there is one array: ON_READ acts as ON_WRITE, and in ``run``
aggregation NONE is accepted by scatter_min, _max and _update only.
"""
