"""Trains for hours under every strategy and launcher while faults strike, and compares the runs.

``make soak ARGS="--seconds N --faults N --seed S --only WAY …"`` continues the journal
``build/soak/journal.jsonl``, which has a line for each fault; ``--slice`` is the few minutes of CI.

A journey is a run that is started again, with ``resume auto``, until it has finished. Each of its
attempts has one fault. After an attempt no process may be left, and no more steps may be lost than
lie between two checkpoints. At the end metrics and weights must equal, bit for bit, those of an
undisturbed run, if all attempts had the same number of ranks.

Jobs on a SLURM cluster are in ``cluster.py``, runs on two nodes with cuts of their network in
``network.py``: a way and its own faults in one file.

To add a way to start a run, write a subclass of ``ways.Way`` whose ``begin`` starts an attempt and
returns its launchers; override ``ranks``, ``stop`` and ``left`` if the processes are not found on
this machine by their working directory; and add objects of it to ``ways.WAYS``.

To add a fault, write a generator in ``faults.py`` with the decorator ``fault``. Before its first
``yield`` it changes how the attempt starts, or returns if it cannot strike now. It continues once
the run has made some steps, and strikes. After another ``yield`` the attempt has ended, and it
undoes what would outlast the attempt.
"""
