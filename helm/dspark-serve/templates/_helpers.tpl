{{- define "dspark.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "dspark.fullname" -}}
{{- $name := include "dspark.name" . -}}
{{- $full := .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name)) -}}
{{- if gt (len $full) 47 }}{{ fail (printf "the name %q is longer than KubeRay's 47 characters; set fullnameOverride" $full) }}{{ end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) }}{{ fail (printf "the name %q is none that begins with a letter and has letters, digits and - only; set fullnameOverride" $full) }}{{ end -}}
{{- $full -}}
{{- end -}}

{{- define "dspark.service" -}}{{ include "dspark.fullname" . }}-serve-svc{{- end -}}

{{- define "dspark.selectorLabels" -}}
app.kubernetes.io/name: {{ include "dspark.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "dspark.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "dspark.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "dspark.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "dspark.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "dspark.fullname" .) }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end -}}
{{- end -}}

{{/* Not empty when some model is fetched by an init container. */}}
{{- define "dspark.fetched" -}}
{{- range .Values.modelVolumes }}{{ if get . "fetch" }}yes{{ end }}{{ end -}}
{{- end -}}

{{- define "dspark.port" -}}
{{- dig "gateway" "port" 8000 .Values.settings | int -}}
{{- end -}}

{{/* Seconds a gateway may take to finish its streams, rounded up. */}}
{{- define "dspark.drain" -}}
{{- dig "gateway" "drain_s" 120 .Values.settings | float64 | ceil | int -}}
{{- end -}}

{{/* Seconds that a proxy without replicas goes on at least: until nothing is sent there any more, and not longer than its pod. */}}
{{- define "dspark.proxyDraining" -}}
{{- $most := add (include "dspark.drain" . | int) 60 | int -}}
{{- $given := .Values.serveProxy.minDrainingSeconds | int -}}
{{- if gt $given $most }}{{ fail (printf "serveProxy.minDrainingSeconds is %d and a pod is killed after %d seconds (settings.gateway.drain_s and 60)" $given $most) }}{{ end -}}
{{- $given | default (min $most (add (mul (int .Values.probes.periodSeconds) (int .Values.probes.failureThreshold)) 5)) -}}
{{- end -}}

{{/* Pods of a worker group: those there are at first, and the least and most that Ray's autoscaler may make of them. */}}
{{- define "dspark.sizes" -}}
{{- $pods := hasKey . "replicas" | ternary (get . "replicas") 1 | int -}}
pods: {{ $pods }}
least: {{ hasKey . "minReplicas" | ternary (get . "minReplicas") $pods | int }}
most: {{ max 1 $pods (get . "maxReplicas" | default 1 | int) }}
{{- end -}}

{{/* Pods that a worker group may come to have; without Ray's autoscaler maxReplicas is a number that nobody reads. Takes root, group. */}}
{{- define "dspark.most" -}}
{{- $sizes := include "dspark.sizes" .group | fromYaml -}}
{{- ternary $sizes.most $sizes.pods .root.Values.autoscaling.enabled | int -}}
{{- end -}}

{{/* Devices of all worker pods together, when all are there. */}}
{{- define "dspark.gpus" -}}
{{- $total := 0 -}}
{{- range $name, $group := .Values.workerGroups }}{{ if not (kindIs "invalid" $group) }}{{ $total = add $total (mul ($group.gpus | default 0 | int) (include "dspark.most" (dict "root" $ "group" $group) | int)) }}{{ end }}{{ end -}}
{{- $total -}}
{{- end -}}

{{/* Devices of the pod that has most. */}}
{{- define "dspark.gpusOfPod" -}}
{{- $most := 0 -}}
{{- range $name, $group := .Values.workerGroups }}{{ if not (kindIs "invalid" $group) }}{{ $most = max $most ($group.gpus | default 0 | int) }}{{ end }}{{ end -}}
{{- $most -}}
{{- end -}}

{{/* The settings tree as the server gets it. GPUs are shared out evenly among engine groups. Placement and GPU shares are decided here: Serve may build the application before any
worker has joined, when Ray still counts no devices. */}}
{{- define "dspark.settings" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- $gateway := merge (dict "host" "0.0.0.0" "port" (include "dspark.port" . | int)) (get $settings "gateway" | default dict) -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $_ := set $gateway "auth" (merge (dict "keys_file" (printf "/etc/dspark/keys/%s" .Values.apiKeys.key)) (get $gateway "auth" | default dict)) -}}
{{- else if not (get $gateway "allow_public_without_keys") -}}
{{- fail "apiKeys.existingSecret: everybody who reaches the service could use it; name a Secret with a key file, or set settings.gateway.allow_public_without_keys to true" -}}
{{- end -}}
{{- $_ := set $settings "gateway" $gateway -}}
{{- if not (get $settings "cache_dir") }}{{ $_ := set $settings "cache_dir" "/cache/dspark" }}{{ end -}}
{{- $total := include "dspark.gpus" . | int -}}
{{- $groups := get $settings "groups" | default 1 | int -}}
{{- $gpus := div $total $groups | int -}}
{{- if and (gt $total 0) (eq $gpus 0) (not (get $settings "resources")) }}{{ fail (printf "settings.groups is %d and the worker groups have %d GPUs; each engine group needs one, or shares in settings.resources" $groups $total) }}{{ end -}}
{{- $placement := get $settings "placement" | default "auto" -}}
{{- if eq $placement "auto" }}{{ $placement = ternary "split" "colocated" (ge $gpus 2) }}{{ end -}}
{{- $_ := set $settings "placement" $placement -}}
{{- $share := ternary (ternary 1.0 0.5 (ge $gpus 2)) 1.0 (eq $placement "split") -}}
{{- if eq $gpus 0 }}{{ $share = 0.0 }}{{ end -}}
{{- $resources := get $settings "resources" | default dict -}}
{{- range $key := list "verifier_gpus" "drafter_gpus" -}}
{{- if or (not (hasKey $resources $key)) (kindIs "invalid" (get $resources $key)) }}{{ $_ := set $resources $key $share }}{{ end -}}
{{- $given := get $resources $key | float64 -}}
{{- if and (gt $given 1.0) (ne $given (floor $given)) }}{{ fail (printf "settings.resources.%s is %v; above 1 Ray takes whole devices only" $key $given) }}{{ end -}}
{{- if or (eq $placement "split") (eq $key "verifier_gpus") -}}
{{- if gt (mulf $given $groups) (float64 $total) }}{{ fail (printf "settings.resources.%s is %v for each of %d engine groups and the worker groups have %d GPUs; set workerGroups.NAME.gpus" $key $given $groups $total) }}{{ end -}}
{{- if gt $given (include "dspark.gpusOfPod" $ | float64) }}{{ fail (printf "settings.resources.%s is %v and no worker pod has so many GPUs; set workerGroups.NAME.gpus" $key $given) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $both := addf (get $resources "verifier_gpus") (get $resources "drafter_gpus") -}}
{{- if and (eq $placement "split") (gt (mulf $both $groups) (addf $total 0.001)) }}{{ fail (printf "settings.resources: verifier_gpus and drafter_gpus are %v together for each of %d engine groups and the worker groups have %d GPUs; state both, or set workerGroups.NAME.gpus" $both $groups $total) }}{{ end -}}
{{- $_ := set $settings "resources" $resources -}}
{{- toPrettyJson $settings -}}
{{- end -}}

{{- define "dspark.serveConfig" -}}
proxy_location: EveryNode
http_options: {host: 0.0.0.0, port: {{ include "dspark.port" . }}}
logging_config: {encoding: {{ .Values.logging.encoding }}, log_level: {{ .Values.logging.level }}, enable_access_log: false}
applications:
  - name: dspark
    route_prefix: /
    import_path: services.app:build
    args:
{{ include "dspark.settings" . | indent 6 }}
{{- with .Values.autoscaling.gateway }}{{ if gt (int .minReplicas) 0 }}
    deployments:
      - name: Gateway
        num_replicas: auto
        autoscaling_config:
          min_replicas: {{ int .minReplicas }}
          max_replicas: {{ max (int .minReplicas) (int .maxReplicas) }}
          target_ongoing_requests: {{ .targetOngoingRequests }}
{{- end }}{{ end }}
{{- end -}}
