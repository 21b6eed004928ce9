"""Random legal programs on the public surface of a communicator, a strategy and a wrapped communicator, against NumPy.

``python -m tests.fuzz --cases 1000`` runs them in jobs of several shapes, each with random settings. All ranks draw the same
case from its number, so a failing one is repeated by the command that is printed with it. A case ends wrong if a result is not
NumPy's, an argument is changed that is no target, something is raised that is no error of mpistrat, or that is not due, or a
rank does not get on.
"""
