"""Mesh, layouts, operator graph, plan, request and program: frozen values and their arithmetic."""
