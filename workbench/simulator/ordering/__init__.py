"""Happens-before in a simulated launch: who knows of whose accesses, and what that lets race."""
