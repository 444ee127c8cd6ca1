"""The node agent, its fork server, and the devices, links and logs that the agent watches."""
