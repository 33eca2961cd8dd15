"""The console script `biphase`, and the supervisor that runs a whole stack on one machine.

Starts the other services as processes; imports none of them.
"""
