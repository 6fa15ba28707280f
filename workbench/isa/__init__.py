"""Instruction sets as data: PTX, and the SASS that ptxas makes of it."""
