"""What people see: tables, findings with their code, plots, Markdown and HTML; and the JSON documents.

Modules are imported where they are used, so that a command loads only what it prints.
"""
